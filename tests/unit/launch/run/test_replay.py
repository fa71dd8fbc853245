"""A replay trains in a folder of its own, and says nothing that it has not trained. Learners are pretended."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launch.cli import app
from launch.fork.fork import fork_run
from launch.run import replay
from launch.run.replay import replay_run
from pipeline.data.checksums import list_checksums
from pipeline.data.run_directory import RunDirectory
from pipeline.data.run_recipes import add_recipe, all_recipes
from pipeline.data.store import BatchStore, LostBatch
from pipeline.errors import FatalError, RunConflictError
from pipeline.trainer.checkpoints import Checkpoints
from tests.support.one_rank import OneRank
from tests.support.whole_runs import whole_run
from tests.support.written_runs import write_run

STEPS = 4


class _Learner(OneRank):
    def save(self, directory: Path) -> None:
        (directory / "shard").write_text("weights")


class Ranks:
    """Stands for the learner's processes: trains to `until`, where it is interrupted, or to the end."""

    def __init__(self) -> None:
        self.trained: list[tuple[str, int, int]] = []
        self.weights = "as they were"
        self.until: int | None = None

    def __call__(self, run: RunDirectory, command: Sequence[str], **_: Any) -> None:
        first, steps = max(run.saved_steps(), default=0), run.recipe().run.steps
        end = self.until or steps
        self.trained.append((run.path.name, first, end))
        if end > first:
            Checkpoints(run.checkpoints, keep=9).save(_Learner(), end, {})  # type: ignore[arg-type]
        if self.until is not None:
            raise FatalError("interrupted")
        export(run, self.weights)


def export(run: RunDirectory, weights: str) -> None:
    shutil.rmtree(run.model, ignore_errors=True)
    run.model.mkdir()
    (run.model / "manifest.json").write_text(json.dumps(dict(tensors={"embed": weights})))
    list_checksums(run.model)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    ranks = Ranks()
    monkeypatch.setattr(replay, "run_ranks", ranks)
    return ranks


@pytest.fixture
def source(tmp_path: Path) -> RunDirectory:
    return made(tmp_path)


def made(folder: Path) -> RunDirectory:
    run = whole_run(folder, steps=STEPS, committed=STEPS, published=STEPS, saved=(2, STEPS), policies=(STEPS,))
    export(run, "as they were")
    return run


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def extend(source: RunDirectory, steps: int) -> None:
    recipe = source.recipe()
    longer = recipe.model_copy(update=dict(run=recipe.run.model_copy(update=dict(steps=steps))))
    add_recipe(source.path, longer, first_step=STEPS, first_batch=STEPS)


def test_a_run_of_that_name_is_left_as_it_is(source: RunDirectory, ranks: Ranks, tmp_path: Path) -> None:
    """Also where the source has a later recipe, which the run would be given."""
    theirs = write_run(tmp_path, 2, name="run-replay")
    extend(source, STEPS + 1)
    before = content(theirs)
    with pytest.raises(RunConflictError, match=r"run-replay is not a replay: it has no replay.json; rename") as refused:
        replay_run(source.path, [])
    assert "\n" not in str(refused.value)
    assert content(theirs) == before
    assert ranks.trained == []


def test_a_finished_replay_is_no_answer_to_a_second_one(source: RunDirectory, ranks: Ranks) -> None:
    assert replay_run(source.path, [])["bit_identical"]
    first = content(source.path.with_name("run-replay"))
    ranks.weights = "as another torch makes them"
    second = replay_run(source.path, [])
    assert (second["bit_identical"], second["differing_tensors"]) == (False, ["embed"])
    assert ranks.trained == [("run-replay", 0, STEPS), ("run-replay-2", 0, STEPS)]
    said = CliRunner().invoke(app, ["train", "--replay", str(source.path), "--json"])
    assert (said.exit_code, json.loads(said.stdout)["bit_identical"]) == (1, False)
    assert second["replay"] == str(source.path.with_name("run-replay-2"))
    assert RunDirectory(Path(second["replay"])).recipe().run.name == "run-replay-2"
    assert content(source.path.with_name("run-replay")) == first


def test_an_interrupted_replay_goes_on(source: RunDirectory, ranks: Ranks) -> None:
    for ranks.until in (2, STEPS):  # the second time behind its last step, before the model is written
        with pytest.raises(FatalError, match="interrupted"):
            replay_run(source.path, [])
    ranks.until = None
    assert replay_run(source.path, [])["bit_identical"]
    assert ranks.trained == [("run-replay", 0, 2), ("run-replay", 2, STEPS), ("run-replay", STEPS, STEPS)]


def test_a_replay_is_extended_with_its_run(source: RunDirectory, ranks: Ranks, tmp_path: Path) -> None:
    replay_run(source.path, [])
    longer = whole_run(tmp_path / "longer", steps=STEPS + 2, committed=STEPS + 2)
    for index in (STEPS, STEPS + 1):
        shutil.copy(BatchStore(longer.batches).path(index), source.batches)
    extend(source, STEPS + 2)
    ranks.until = STEPS + 2  # behind the last step: the model is still that of STEPS
    with pytest.raises(FatalError, match="interrupted"):
        replay_run(source.path, [])
    ranks.until = None
    assert replay_run(source.path, [])["steps"] == STEPS + 2
    assert [first for _, first, _ in ranks.trained] == [0, STEPS, STEPS + 2]
    assert {name for name, *_ in ranks.trained} == {"run-replay"}
    assert [one.first_step for one in all_recipes(tmp_path / "run-replay")] == [0, STEPS]


@pytest.mark.parametrize(("changed", "said"), [("recipe", "recipe 0"), ("batches", "batch 0")])
def test_a_replay_of_a_run_that_is_gone_is_none_of_its_successor(
    source: RunDirectory, ranks: Ranks, tmp_path: Path, changed: str, said: str
) -> None:
    replay_run(source.path, [])
    shutil.rmtree(source.path)
    made(tmp_path)
    if changed == "recipe":
        other = write_run(tmp_path / "other", 0)
        shutil.copy(other / "recipe.yaml", source.path)
    else:
        store = BatchStore(source.batches)
        shutil.copy(store.path(1), store.path(0))
    before = content(tmp_path / "run-replay")
    with pytest.raises(RunConflictError, match=rf"run-replay is the replay of another run \({said} differs\); rename"):
        replay_run(source.path, [])
    assert content(tmp_path / "run-replay") == before
    assert len(ranks.trained) == 1


def test_a_batch_that_was_lost_since_makes_it_another_run(source: RunDirectory, ranks: Ranks) -> None:
    replay_run(source.path, [])
    store = BatchStore(source.batches)
    lost = dict(reason="gone", recorded="now", learned=False, groups=(2, 3), known="all", next_group=4, open_groups=())
    LostBatch(index=1, **lost).write(store.lost_path(1))  # type: ignore[arg-type]
    source.note_skipped(1)
    with pytest.raises(RunConflictError, match=r"another run \(batch 1 differs\)"):
        replay_run(source.path, [])
    shutil.rmtree(source.path.with_name("run-replay"))
    assert replay_run(source.path, [])["bit_identical"]


def test_a_fork_that_learns_by_another_objective_is_refused(source: RunDirectory, ranks: Ranks) -> None:
    fork = RunDirectory(Path(fork_run(source.path, Path("fork"), 2, ["objective.name=cispo"])["run"]))
    export(fork, "of two objectives")
    said = (
        r"fork cannot be replayed: at step 2 its recipe changed \(objective.name: p3o → cispo; .* replay the run that"
    )
    with pytest.raises(RunConflictError, match=said) as refused:
        replay_run(fork.path, [])
    assert "\n" not in str(refused.value)
    assert not fork.path.with_name("fork-replay").exists()


@pytest.mark.parametrize(
    "override",
    [
        *("learner.optimizer.lr=0.5", "rollout.group_size=4", "evaluation.samples=3", "prompts.max_refills=7"),
        *("task.min_digits=3", "rollout.engines=2"),
    ],
)
def test_a_fork_whose_steps_are_learned_alike_is_replayed(source: RunDirectory, ranks: Ranks, override: str) -> None:
    fork = RunDirectory(Path(fork_run(source.path, Path("fork"), 2, [override])["run"]))
    for index in range(2, STEPS):
        shutil.copy(BatchStore(source.batches).path(index), fork.batches)
    export(fork, "as they were")
    assert replay_run(fork.path, [])["bit_identical"]
