"""A fork with another controller, or another ladder for it, begins at the ladder's foot; with the same it goes on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launch.build.control import build_ladder
from launch.fork.fork import fork_run
from launch.roles.collector import lags_of
from launch.verify.history import check_history
from pipeline.control.files import ControlFiles
from pipeline.control.step_controller import StepController
from pipeline.data.checksums import write_sealed
from pipeline.data.event_log import EventLog
from pipeline.data.run_directory import RunDirectory, unfenced
from pipeline.ports.learner import Update
from pipeline.repair import find_damage, plan_repair
from precision.controller.policy import EngineEvidence, Failure, Observation, State
from tests.support.batches import batch_of_rewards
from tests.support.one_rank import OneRank
from tests.support.whole_runs import damage, whole_run

AT = 4
LAGS = ((4, 2), (6, 1))
BAD = EngineEvidence(loss=0.5, loss_of_others=0.1, start=3)
PARENT_STATE = State(
    staleness=3,
    quant_map=1,
    promoted=("a",),
    suspects={0: Failure(times=1, retry_at=9)},
    window=(Observation(loss=0.2, engines={0: BAD}),),
)
CONTROLLER = 'controller={"ess_floor":0.9}'


def parent(folder: Path, *, controlled: bool = True) -> RunDirectory:
    """On rung 3 after the step before the fork, where it is controlled."""
    run = whole_run(folder, schedule=dict(kind="async", lag=8), controlled=controlled)
    files = ControlFiles(run.control, unfenced)
    if controlled:
        record = files.read(AT - 1)
        assert record is not None
        (run.control / f"{AT - 1:06d}.json").unlink()
        engines = dict(restarts={0: 1}, first_seen={0: (1, 0)})
        files.create(record.model_copy(update=dict(state=PARENT_STATE, lags=LAGS, lr_by_age=True, **engines)))
        run.quant_maps.mkdir()
        write_sealed(run.quant_maps / "000001.yaml", "base: fp8_block\n")
    return run


def controller(run: RunDirectory, used: list[int]) -> StepController:
    recipe = run.recipe()
    assert recipe.controller is not None
    stubs: dict[str, Any] = dict(
        learner=OneRank(),
        measure=lambda *_: None,
        members=list,
        is_lost=lambda member: False,
        digest=lambda groups: "",
        use_map=lambda number, modules: used.append(number),
        modules_of=lambda groups: (),
        updates_per_batch=recipe.learner.updates_per_batch,
    )
    return StepController(
        settings=recipe.controller,
        ladder=build_ladder(recipe),
        files=ControlFiles(run.control, unfenced),
        event_log=EventLog(run.path, "learner-000001"),
        **stubs,
    )


def train_one(own: StepController, step: int) -> dict[str, float]:
    batch = batch_of_rewards([[1.0, 0.0]] * 2, index=step, seed=step)
    scored = torch.from_numpy(batch.rollout_logprobs.astype(np.float32))
    return own.after(batch, Update(metrics={}, histogram=[], device_logprobs=scored))


@pytest.mark.parametrize(
    ("controlled", "override"),
    [
        (False, CONTROLLER),
        (True, CONTROLLER),
        (True, "schedule.kind=sync"),
        (True, "schedule.lag=1"),
        (True, "schedule.lag=4"),
        (True, "rollout.precision=emulated_fp6"),
    ],
)
def test_what_the_parent_had_decided_holds_no_longer(
    tmp_path: Path, controlled: bool, override: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.build.control.build_quant_map", lambda recipe: None)
    source = parent(tmp_path, controlled=controlled)
    fork_run(source.path, Path("new"), AT, [override])
    run, used = RunDirectory(tmp_path / "new"), list[int]()
    assert plan_repair(run, find_damage(run), "by a test").repairs == []
    own = controller(run, used)
    own.restore(AT)
    assert (own.state, used) == (State(), [0])
    assert train_one(own, AT)["staleness_rung"] == 0.0
    record = ControlFiles(run.control, unfenced).read(AT)
    assert record is not None
    assert (record.lags, record.lr_by_age, record.restarts) == ((), False, {})
    decided = lags_of(run, run.recipe())
    assert decided is None or decided(AT) == ()
    assert not run.quant_maps.exists() or not any(run.quant_maps.iterdir()), "their numbers are given anew"
    kept = ControlFiles(source.control, unfenced).read(AT - 1)
    assert kept is None or kept.state == PARENT_STATE


def test_the_same_controller_on_the_same_ladder_goes_on(tmp_path: Path) -> None:
    fork_run(parent(tmp_path).path, Path("new"), AT, ["learner.optimizer.lr=0.5"])
    run, used = RunDirectory(tmp_path / "new"), list[int]()
    own = controller(run, used)
    own.restore(AT)
    expected = PARENT_STATE.model_copy(update=dict(suspects={}, window=(Observation(loss=0.2),)))
    assert (own.state, used) == (expected, [1])
    decided = lags_of(run, run.recipe())
    assert decided is not None
    assert decided(AT) == LAGS
    assert (run.quant_maps / "000001.yaml").exists()


def test_what_the_parent_decided_of_its_engines_is_not_carried_out_on_the_forks(tmp_path: Path) -> None:
    """Starts are counted anew: the parent's first start of engine 0 was bad, and is not that of the fork."""
    source = parent(tmp_path)
    before = {path.name: path.read_bytes() for path in source.control.iterdir()}
    fork_run(source.path, Path("new"), AT, ["learner.optimizer.lr=0.5"])
    run = RunDirectory(tmp_path / "new")
    assert plan_repair(run, find_damage(run), "by a test").repairs == []
    record = ControlFiles(run.control, unfenced).newest()
    assert record is not None
    assert (record.step, record.restarts, record.first_seen) == (AT - 1, {}, {})
    own = controller(run, [])
    own.restore(AT)
    train_one(own, AT)
    later = ControlFiles(run.control, unfenced).read(AT)
    assert later is not None
    assert (later.lags, later.restarts) == (LAGS, {})
    assert {path.name: path.read_bytes() for path in source.control.iterdir()} == before


def test_a_fork_without_a_controller_needs_no_record_and_has_the_lag_of_its_recipe(tmp_path: Path) -> None:
    source = parent(tmp_path)
    fork_run(source.path, Path("new"), AT, ["controller=null"])
    run = RunDirectory(tmp_path / "new")
    sampled = f"{AT:06d}.zarr.zip"
    shutil.copyfile(source.batches / sampled, run.batches / sampled)  # by version 0, as a lag of 8 allows
    assert check_history(run.path)["version_violations"] == 0
    damage(run.control / f"{AT - 1:06d}.json")
    repairs = plan_repair(run, find_damage(run), "by a test").repairs
    assert [repair.path.parent.name for repair in repairs] == ["control"]
