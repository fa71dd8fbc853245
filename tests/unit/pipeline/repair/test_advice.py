"""Each advice of a message about damage, taken: what read the file before reads it again, or goes on without it.

A message either names `evenkeel repair`, or says what to do with one file that nothing else hangs on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.control.files import ControlFiles
from pipeline.data.epochs import claim, epoch_folder, newest
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import StoreError
from pipeline.ports.weights import WeightCheck
from pipeline.repair.apply import apply, repaired_paths
from pipeline.repair.damage import find_damage
from pipeline.repair.plan import plan_repair
from pipeline.trainer.checkpoints import Checkpoints
from tests.support.one_rank import OneRank
from tests.support.whole_runs import damage, finish, whole_run

Read = Callable[[RunDirectory], Any]


class Learner(OneRank):
    def load(self, directory: Path) -> None: ...


def restored(run: RunDirectory) -> int:
    return Checkpoints(run.checkpoints, 9).restore(Learner())[0]  # type: ignore[arg-type]


REPAIRED: dict[str, tuple[Read, Any]] = {
    "batches/000005.zarr.zip": (lambda run: BatchStore(run.batches).groups_to_ask(), (10, ())),
    "checkpoints/000004": (restored, 2),
    "checkpoints/000004/COMMIT": (restored, 2),
    "policy/PUBLISHED/000005": (lambda run: run.published_version(), 5),
    "policy/000005/weight_check.json": (
        lambda run: WeightCheck.load(run.policy_directory(run.newest_policy(5)), 4),
        WeightCheck(version=4),
    ),
    "control/000003.json": (lambda run: ControlFiles(run.control, run.fence).read(3), None),
    "logprobs/000003-old.npy": (lambda run: run.old_logprobs(3), None),
}
"""File → who reads it, and what it finds after the repair."""


@pytest.mark.parametrize("name", REPAIRED)
def test_repair_is_named_and_helps(tmp_path: Path, name: str) -> None:
    run = whole_run(tmp_path, controlled=True)
    for step in range(5):
        run.write_old_logprobs(step, run.learner_logprobs(step))  # type: ignore[arg-type]
    read, expected = REPAIRED[name]
    damage(run.path / name)
    with pytest.raises(StoreError, match="`evenkeel repair"):
        read(run)
    apply(run, plan_repair(run, find_damage(run), "now"))
    assert read(run) == expected


REMOVED: dict[str, tuple[Read, Any]] = {
    "logprobs/000003.npy": (lambda run: run.learner_logprobs(3), None),
    "finished/learner": (lambda run: run.is_finished(), False),
    "epochs/learner/NEWEST": (lambda run: newest(epoch_folder(run.path, "learner")), 1),
    "repairs/000001.json": (repaired_paths, set()),
}
"""Files whose message says "remove it"."""


@pytest.mark.parametrize("name", REMOVED)
def test_removing_it_helps(tmp_path: Path, name: str) -> None:
    run = whole_run(tmp_path)
    finish(run)
    apply(run, plan_repair(run, find_damage(run), "now"))
    read, expected = REMOVED[name]
    damage(run.path / name)
    with pytest.raises(StoreError, match=r"; remove it|; [^;]*remove it") as said:
        read(run)
    assert name in str(said.value)
    (run.path / name).unlink()
    assert read(run) == expected
    assert claim(run.path, "learner").number == 2


def test_a_lost_batch_is_not_put_back_by_reading_on(tmp_path: Path) -> None:
    """A copy helps before the repair; the message says so first."""
    run = whole_run(tmp_path)
    path = BatchStore(run.batches).path(1)
    copy = path.read_bytes()
    damage(path)
    with pytest.raises(StoreError, match=re.escape("put back a copy of it, or stop the run and repair it")):
        BatchStore(run.batches).read(1, None)
    path.write_bytes(copy)
    assert BatchStore(run.batches).read(1, None).index == 1
    assert find_damage(run) == []
