"""Recorded runs of an ESS controller: its decisions are repeated, and formats that it changed are not guessed."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from launch.attribution.measure import Recorded, bounded, refuse_learned_otherwise, require_first_map
from launch.attribution.rows import MOST_ROWS
from launch.fork.fork import fork_run
from pipeline.control.files import ControlFiles, ControlRecord
from pipeline.data.run_directory import RunDirectory
from pipeline.data.run_recipes import RecipeInForce, all_recipes
from pipeline.errors import RunConflictError, StoreError
from precision.controller.policy import Decision, Evidence, State
from tests.support.whole_runs import recipe_of, whole_run

DECISION = Decision(action="climb", cause="quantization", rung="layer 0", because="ESS 0.8 below 0.9.")
VERSIONS = np.array([4, 5, 5], np.int32)


def recorded() -> Recorded:
    batch: Any = SimpleNamespace(policy_version=VERSIONS, loss_mask=np.ones(3, np.bool_))
    return Recorded(6, batch, np.zeros(3))


@pytest.mark.parametrize(("step", "refused"), [(3, True), (4, True), (5, False)])
def test_batches_of_changed_formats_are_refused(tmp_path: Path, step: int, refused: bool) -> None:
    """The decision of step 4 comes with version 5."""
    run = RunDirectory(tmp_path)
    control = ControlFiles(run.control, lambda: None)
    for number, quant_map in ((1, 0), (step, 1)):
        state = State(quant_map=quant_map)
        control.create(
            ControlRecord(step=number, evidence=Evidence(step=number, loss=0.1), state=state, decision=DECISION)
        )
    if not refused:
        require_first_map(run, recorded(), in_force(controlled=True))
        return
    with pytest.raises(StoreError, match=rf"from version {step + 1} on the controller changed .*000001.yaml"):
        require_first_map(run, recorded(), in_force(controlled=True))


@pytest.mark.parametrize(
    ("afresh", "controlled", "refused"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_what_a_forks_parent_had_changed_counts_where_the_fork_goes_on_with_it(
    tmp_path: Path, afresh: bool, controlled: bool, refused: bool
) -> None:
    """A fork at step 4, whose parent's controller changed formats after step 1."""
    run = RunDirectory(tmp_path)
    control, changed = ControlFiles(run.control, lambda: None), State(quant_map=1)
    control.create(ControlRecord(step=1, evidence=Evidence(step=1, loss=0.1), state=changed, decision=DECISION))
    control.create(ControlRecord(step=3, state=State() if afresh else changed))
    with pytest.raises(StoreError, match="from version 2 on") if refused else nullcontext():
        require_first_map(run, recorded(), in_force(controlled=controlled, first_step=4))


def in_force(*, controlled: bool, first_step: int = 0) -> RecipeInForce:
    recipe = recipe_of(Path(), schedule=dict(kind="sync"), steps=8, controlled=controlled)
    return RecipeInForce(first_step=first_step, first_batch=first_step, recipe=recipe, path=Path())


def sampled(run: RunDirectory, index: int) -> tuple[Recorded, list[RecipeInForce], RecipeInForce]:
    """Batch `index`, whose tokens are of version `index`, all recipes, and its own."""
    recipes = all_recipes(run.path)
    batch: Any = SimpleNamespace(policy_version=np.full(3, index, np.int32), loss_mask=np.ones(3, np.bool_))
    own = [one for one in recipes if one.first_batch <= index][-1]
    return Recorded(index, batch, np.zeros(3)), recipes, own


def test_a_batch_of_a_fork_is_measured_by_the_recipe_that_trained_its_steps(tmp_path: Path) -> None:
    source = whole_run(tmp_path, saved=(2, 4))
    made = fork_run(source.path, Path("fork"), 4, ["objective.name=cispo", "rollout.precision=emulated_fp6"])
    fork = RunDirectory(Path(made["run"]))
    before, recipes, own = sampled(fork, 3)
    assert (own.recipe.objective.name, own.recipe.rollout.precision) == ("p3o", "fp32")
    refuse_learned_otherwise(fork, before, recipes, own)
    after, recipes, own = sampled(fork, 5)
    assert (own.recipe.objective.name, own.recipe.rollout.precision) == ("cispo", "emulated_fp6")
    refuse_learned_otherwise(fork, after, recipes, own)
    shutil.rmtree(fork.checkpoints / "000004")  # checkpoint.keep
    said = r"batch 5 .* by training steps 0 to 4 again, but at step 4 its recipe changed \(objective.name: p3o → cispo"
    with pytest.raises(RunConflictError, match=said) as refused:
        refuse_learned_otherwise(fork, after, recipes, own)
    assert "\n" not in str(refused.value)


def test_a_fork_with_another_learning_rate_is_trained_again_from_the_beginning(tmp_path: Path) -> None:
    """Its steps have the rates that they had."""
    source = whole_run(tmp_path, saved=(4,))
    fork = RunDirectory(Path(fork_run(source.path, Path("fork"), 4, ["learner.optimizer.lr=0.5"])["run"]))
    shutil.rmtree(fork.checkpoints / "000004")
    recorded_batch, recipes, own = sampled(fork, 5)
    refuse_learned_otherwise(fork, recorded_batch, recipes, own)


def test_of_a_large_batch_some_rows_are_attributed_evenly_spread() -> None:
    count = 4 * MOST_ROWS
    offsets = 2 * np.arange(count + 1)
    sampled = dict(loss_mask=np.ones(2 * count, np.bool_), policy_version=np.zeros(2 * count, np.int32))
    batch: Any = SimpleNamespace(num_samples=count, response_offsets=offsets, **sampled)
    some = bounded(Recorded(6, batch, np.zeros(2 * count)))
    rows = np.unique(np.flatnonzero(some.counts) // 2)
    assert (len(rows), some.counts.sum(), some.rows_left_out) == (MOST_ROWS, 2 * MOST_ROWS, 3 * MOST_ROWS)
    assert set(np.diff(rows)) <= {4, 5}
    assert bounded(some).rows_left_out == 0
