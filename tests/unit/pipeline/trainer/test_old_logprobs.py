"""pi_old: scored when a stage begins, kept for a learner that is started again inside it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.data.checksums import read_sealed_json
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RunConflictError, StoreError
from pipeline.schedule import Schedule
from pipeline.spans import Stopwatch
from pipeline.trainer.old_logprobs import OldLogprobs, require_same_reference
from tests.support.one_rank import OneRank


class Learner(OneRank):
    """Scores batch b as `weights` + b, and remembers what it was asked."""

    def __init__(self, weights: float) -> None:
        self.weights = weights
        self.scored: list[int] = []

    def score(self, batch: Any) -> Any:
        self.scored.append(batch.index)
        return torch.full((3,), self.weights + batch.index)


def batch(index: int) -> Any:
    return SimpleNamespace(index=index, rollout_logprobs=np.zeros(3, np.float32))


def nothing() -> None: ...


def old_logprobs(folder: Path, learner: Learner, schedule: Schedule, updates_per_batch: int = 1) -> OldLogprobs:
    run = RunDirectory(folder)
    run.logprobs.mkdir(parents=True, exist_ok=True)
    adapters: dict[str, Any] = dict(
        learner=learner, batches=SimpleNamespace(wait=lambda index, meanwhile: batch(index))
    )
    return OldLogprobs(run=run, schedule=schedule, updates_per_batch=updates_per_batch, **adapters)


def test_a_stage_is_scored_once_and_whole(tmp_path: Path) -> None:
    learner = Learner(weights=-10.0)
    old = old_logprobs(tmp_path, learner, Schedule(kind="staged", steps=5, updates_per_stage=3))
    for step, expected in ((0, -10.0), (1, -9.0), (2, -8.0)):
        found = old.of(batch(step), Stopwatch(), nothing)
        assert found is not None
        assert found.tolist() == [expected] * 3
        assert sorted(old._stage) == [*range(step + 1, 3)], "what was used takes no memory of the GPU any more"
        learner.weights += 100.0  # the policy moves within the stage; pi_old does not
    assert learner.scored == [0, 1, 2]
    learner.weights = -20.0
    last = old.of(batch(3), Stopwatch(), nothing)
    assert last is not None
    assert last[0] == -17.0
    assert learner.scored == [0, 1, 2, 3, 4]  # the run ends within its second stage


def test_waiting_for_the_batches_of_a_stage_is_waiting(tmp_path: Path) -> None:
    """And the checkpoint that is being written is looked at meanwhile."""
    learner, looked = Learner(weights=-10.0), list[int]()
    old = old_logprobs(tmp_path, learner, Schedule(kind="staged", steps=3, updates_per_stage=3))

    def wait(index: int, meanwhile: Any) -> Any:
        time.sleep(0.05)
        meanwhile()
        return batch(index)

    old, watch = replace(old, batches=SimpleNamespace(wait=wait)), Stopwatch()  # type: ignore[arg-type]
    assert old.of(batch(0), watch, lambda: looked.append(len(learner.scored))) is not None
    assert looked == [0, 1, 2]
    assert watch.seconds["wait"] > 0.15
    assert watch.seconds["wait"] + watch.seconds["logprobs"] <= watch.total_s


def test_a_lost_batch_of_a_stage_is_left_out(tmp_path: Path) -> None:
    learner = Learner(weights=-10.0)
    old = old_logprobs(tmp_path, learner, Schedule(kind="staged", steps=3, updates_per_stage=3))
    old = replace(old, batches=SimpleNamespace(wait=lambda index, meanwhile: None if index == 1 else batch(index)))  # type: ignore[arg-type]
    assert old.of(batch(0), Stopwatch(), nothing) is not None
    found = old.of(batch(2), Stopwatch(), nothing)
    assert found is not None
    assert found[0] == -8.0
    assert learner.scored == [0, 2]


@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("scored_before", [False, True])
def test_a_stage_whose_first_batches_were_lost_is_scored_at_the_next_one(
    tmp_path: Path, lost: int, restarted: bool, scored_before: bool
) -> None:
    schedule = Schedule(kind="staged", steps=8, updates_per_stage=4)
    if scored_before:  # by a learner that was killed before a checkpoint
        old_logprobs(tmp_path, Learner(weights=-10.0), schedule).of(batch(4), Stopwatch(), nothing)
    learner = Learner(weights=-10.0)
    old = old_logprobs(tmp_path, learner, schedule)
    if not restarted:
        assert old.of(batch(0), Stopwatch(), nothing) is not None
        learner.scored.clear()
    for step in range(4, 4 + lost):
        old.run.note_skipped(step)
    for step in range(4 + lost, 8):
        found = old.of(batch(step), Stopwatch(), nothing)
        assert found is not None
        assert found[0] == -10.0 + step
        learner.weights += 100.0
        if restarted:
            old = old_logprobs(tmp_path, learner, schedule)
    assert learner.scored == [*range(4 + lost, 8)]


def test_a_first_batch_that_was_lost_after_its_step_leaves_the_stage_as_it_was_scored(tmp_path: Path) -> None:
    schedule = Schedule(kind="staged", steps=4, updates_per_stage=4)
    old_logprobs(tmp_path, Learner(weights=-10.0), schedule).of(batch(0), Stopwatch(), nothing)
    successor = Learner(weights=5.0)  # its checkpoint has learned from batch 0
    found = old_logprobs(tmp_path, successor, schedule).of(batch(1), Stopwatch(), nothing)
    assert found is not None
    assert (found[0], successor.scored) == (-9.0, [])


def test_a_learner_that_is_started_again_inside_a_stage_reads_what_was_kept(tmp_path: Path) -> None:
    schedule = Schedule(kind="staged", steps=3, updates_per_stage=3)
    old_logprobs(tmp_path, Learner(weights=-10.0), schedule).of(batch(0), Stopwatch(), nothing)
    successor = Learner(weights=5.0)
    found = old_logprobs(tmp_path, successor, schedule).of(batch(2), Stopwatch(), nothing)
    assert found is not None
    assert found[0] == -8.0
    assert successor.scored == []


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_batch_of_several_updates_is_scored_as_a_whole(tmp_path: Path, kind: Any) -> None:
    learner = Learner(weights=-10.0)
    found = old_logprobs(tmp_path, learner, Schedule(kind=kind, steps=4, lag=2), updates_per_batch=4).of(
        batch(1), Stopwatch(), nothing
    )
    assert found is not None
    assert found.tolist() == [-9.0] * 3
    assert learner.scored == [1]


@pytest.mark.parametrize("fresh", [False, True])
def test_of_the_version_that_sampled_they_come_from_the_kept_versions(tmp_path: Path, fresh: bool) -> None:
    learner = Learner(weights=-10.0)
    versions: Any = SimpleNamespace(logprobs=lambda _: None if fresh else torch.full((3,), -7.0))
    old = replace(old_logprobs(tmp_path, learner, Schedule(kind="async", steps=4, lag=2)), versions=versions)
    found = old.of(batch(1), Stopwatch(), nothing)
    assert (found is None) == fresh, "of a fresh batch the scored step has them"
    assert found is None or found.tolist() == [-7.0] * 3
    assert learner.scored == []


def test_what_was_kept_of_another_batch_is_refused_by_name(tmp_path: Path) -> None:
    schedule = Schedule(kind="staged", steps=5, updates_per_stage=3)
    old = old_logprobs(tmp_path, Learner(weights=-10.0), schedule)
    old.run.write_logprobs(1, np.zeros(7, np.float32), old=True)
    with pytest.raises(StoreError, match=r"000001-old\.npy holds 7 log-probabilities, but its batch has 3 response"):
        old.of(batch(1), Stopwatch(), nothing)


def test_what_one_rank_cannot_read_ends_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[bool] = []

    class Together(Learner):
        def gather(self, action: Any) -> Any:
            inside.append(True)
            results = super().gather(action)
            inside.pop()
            return results

    schedule = Schedule(kind="staged", steps=3, updates_per_stage=3)
    old_logprobs(tmp_path, Learner(weights=-10.0), schedule).of(batch(0), Stopwatch(), nothing)
    again, read = old_logprobs(tmp_path, Together(weights=0.0), schedule), RunDirectory.old_logprobs

    def together(self: RunDirectory, *args: Any) -> Any:
        assert inside
        return read(self, *args)

    monkeypatch.setattr(RunDirectory, "old_logprobs", together)
    found = again.of(batch(1), Stopwatch(), nothing)
    assert found is not None
    assert found.tolist() == [-9.0] * 3


RANK_ZERO: Any = SimpleNamespace(is_rank_zero=True, tell=lambda action: action())


def test_other_weights_are_refused_and_the_same_ones_again_are_not(tmp_path: Path) -> None:
    run, model = RunDirectory(tmp_path / "run"), tmp_path / "model"
    run.path.mkdir()
    model.mkdir()
    for name in ("a", "b"):
        (model / f"{name}.safetensors").write_bytes(name.encode())
    require_same_reference(run, RANK_ZERO, model)
    assert set(read_sealed_json(run.reference_file, "")) == {"a.safetensors", "b.safetensors"}
    require_same_reference(run, RANK_ZERO, model)
    (model / "b.safetensors").write_bytes(b"B")
    with pytest.raises(RunConflictError, match=r"holds other weights than the reference.*put them back"):
        require_same_reference(run, RANK_ZERO, model)
