"""Every kind of damage is found, is repaired so that the run can go on, and stays repaired."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.fork.fork import fork_run
from pipeline.analysis.audit import verify_history
from pipeline.control.files import ControlFiles
from pipeline.data.batch import Share
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore, LostBatch
from pipeline.errors import RunConflictError
from pipeline.repair import Plan, apply, find_damage, plan_repair, repaired_paths
from pipeline.rollout.batch_builder import HoleAllocator
from tests.support.delta_policies import drawn, moved, write_version
from tests.support.whole_runs import GROUPS, damage, finish, whole_run

STAGED = dict(kind="staged", updates_per_stage=4)


def plan_of(run: RunDirectory) -> Plan:
    return plan_repair(run, find_damage(run), "now")


def becomes(run: RunDirectory) -> dict[str, str]:
    return {str(one.path.relative_to(run.path)): one.becomes for one in plan_of(run).repairs}


def repaired(run: RunDirectory) -> Plan:
    plan = plan_of(run)
    apply(run, plan)
    left = [one for one in find_damage(run) if not (one.kind == "batch" and not one.path.exists())]
    assert left == []
    return plan


def test_a_whole_run_has_no_damage(tmp_path: Path) -> None:
    run = whole_run(tmp_path, controlled=True)
    finish(run)
    assert find_damage(run) == []
    assert plan_of(run) == Plan()


@pytest.mark.parametrize(
    "name",
    [
        "batches/000005.zarr.zip",
        "batches/000001.zarr.zip",
        "checkpoints/000004",
        "checkpoints/000004/COMMIT",
        "policy/000004",
        "policy/000005",
        "policy/000005/weight_check.json",
        "policy/PUBLISHED/000005",
        "evaluations/000002.json",
        "control/000001.json",
        "control/000003.json",
        "epochs/learner/NEWEST",
        "engines/000000.json",
        "finished/learner",
        "model",
    ],
)
def test_every_kind_is_found_and_repaired(tmp_path: Path, name: str) -> None:
    run = whole_run(tmp_path, controlled=True)
    finish(run)
    whole = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    damage(run.path / name)
    found = [str(one.path) for one in find_damage(run)]
    assert any(path.startswith(str(run.path / name)) or str(run.path / name).startswith(path) for path in found)
    repaired(run)
    for path, data in whole.items():
        if name not in str(path) and "finished" not in str(path) and "checkpoints" not in name + str(path):
            assert not path.exists() or path.read_bytes() == data or "000003.json" in name
    assert run.published_version() == 5


def test_a_batch_that_no_one_has_learned_from_is_made_again(tmp_path: Path) -> None:
    run = whole_run(tmp_path)
    damage(run.batches / "000005.zarr.zip")
    assert becomes(run) == {"batches/000005.zarr.zip": "set aside: the collector makes it again"}
    repaired(run)
    assert BatchStore(run.batches).next_index == 5
    assert run.why_not_sampled(5) is None
    assert (run.path / "damaged/000001/batches/000005.zarr.zip").exists()
    assert repaired_paths(run) == {"batches/000005.zarr.zip"}


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (1, "the checkpoint of step 4 has learned from it"),
        (4, "the engines serve version 5, which has learned from it; its step is skipped"),
    ],
)
def test_a_batch_that_was_learned_from_is_recorded_as_lost(tmp_path: Path, index: int, reason: str) -> None:
    run = whole_run(tmp_path)
    name = f"batches/00000{index}.zarr.zip"
    damage(run.path / name)
    assert becomes(run) == {name: f"recorded as lost: {reason}"}
    repaired(run)
    store = BatchStore(run.batches)
    lost = store.gone(index)
    assert isinstance(lost, LostBatch)
    assert (lost.learned, lost.known) == (index < 4, "all")
    assert lost.groups == (GROUPS * index, GROUPS * index + 1)
    assert store.next_index == 6
    audit = verify_history(run.path, run.recipe().build_schedule(), 6)
    assert audit.sound
    assert [one.index for one in audit.damaged] == [index]
    assert plan_of(run) == Plan()


def test_a_deleted_batch_is_damage_too(tmp_path: Path) -> None:
    run = whole_run(tmp_path)
    (run.batches / "000002.zarr.zip").unlink()
    repaired(run)
    lost = BatchStore(run.batches).gone(2)
    assert isinstance(lost, LostBatch)
    assert lost.reason == "missing"


def test_lost_ones_in_a_row_and_one_that_is_made_again_share_their_groups(tmp_path: Path) -> None:
    run = whole_run(tmp_path, schedule=dict(kind="async", lag=3), committed=8, published=5)
    for index in (3, 4, 5, 6):
        damage(run.batches / f"00000{index}.zarr.zip")
    repaired(run)
    store = BatchStore(run.batches)
    assert [lost.index for lost in store.all_lost()] == [3, 4]
    assert [(lost.groups, lost.known) for lost in store.all_lost()] == [((6, 7), "together"), ((8, 9), "together")]
    assert store.holes(99) == [5, 6]
    allocator = HoleAllocator.of(store, 5, GROUPS)
    assert [allocator.take(5) for _ in range(3)] == [10, 11, None]


def test_the_newest_batch_is_lost_with_the_groups_that_it_held_at_least(tmp_path: Path) -> None:
    run = whole_run(tmp_path, committed=5)
    damage(run.batches / "000004.zarr.zip")
    repaired(run)
    store = BatchStore(run.batches)
    lost = store.gone(4)
    assert isinstance(lost, LostBatch)
    assert (lost.groups, lost.known) == ((8, 9), "first")
    assert store.groups_to_ask() == (10, ())


def test_a_damaged_record_of_a_loss_is_written_again(tmp_path: Path) -> None:
    run = whole_run(tmp_path)
    damage(run.batches / "000001.zarr.zip")
    repaired(run)
    damage(run.batches / "000001.lost.json")
    repaired(run)
    assert [lost.groups for lost in BatchStore(run.batches).all_lost()] == [(2, 3)]


@pytest.mark.parametrize(
    ("names", "after", "left"),
    [(("000004",), "step 2", [2]), (("000002",), "step 4", [4]), (("000002", "000004"), "its beginning", [])],
)
def test_the_newest_whole_checkpoint_is_gone_on_from(
    tmp_path: Path, names: tuple[str, ...], after: str, left: list[int]
) -> None:
    run = whole_run(tmp_path)
    for name in names:
        damage(run.checkpoints / name)
    assert repaired(run).after == f"started again, the run goes on from {after}"
    assert run.saved_steps() == left


def test_without_the_controllers_record_its_step_is_decided_again(tmp_path: Path) -> None:
    """The checkpoint of step 4 goes on from the record of step 3."""
    run = whole_run(tmp_path, controlled=True)
    damage(run.control / "000003.json")
    assert repaired(run).after.endswith("from step 2")
    assert run.saved_steps() == [2]
    assert ControlFiles(run.control, run.fence).read(3) is None
    damage(run.control / "000000.json")
    assert repaired(run).after.endswith("from step 2")


@pytest.mark.parametrize("name", ["checkpoints/000004", "control/000003.json"])
def test_a_fork_that_cannot_train_its_first_step_again_is_to_be_made_anew(tmp_path: Path, name: str) -> None:
    """It would begin at step 0, with its parent's batches. The controller goes on from what step 3 decided."""
    fork_run(whole_run(tmp_path, controlled=True).path, Path("new"), 4)
    run = RunDirectory(tmp_path / "new")
    assert plan_of(run) == Plan()
    damage(run.path / name)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(RunConflictError, match=rf"is a fork at step 4 .*{name}.*`evenkeel fork PARENT NEW --at 4`"):
        repaired(run)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_a_fork_that_is_async_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """The start publishes the checkpoint's version, by which its first batch may be sampled."""
    fork_run(whole_run(tmp_path, schedule=dict(kind="async", lag=1)).path, Path("new"), 4)
    run = RunDirectory(tmp_path / "new")
    assert plan_of(run) == Plan()
    damage(run.evaluations / "000002.json")
    assert repaired(run).after.endswith("from step 4")
    assert run.saved_steps() == [4]


def test_a_finished_fork_is_repaired_without_a_checkpoint(tmp_path: Path) -> None:
    fork_run(whole_run(tmp_path).path, Path("new"), 4)
    run = RunDirectory(tmp_path / "new")
    finish(run)
    shutil.rmtree(run.checkpoints / "000004")
    assert plan_of(run) == Plan()
    damage(run.evaluations / "000002.json")
    assert [one.path.name for one in repaired(run).repairs] == ["000002.json"]
    assert run.is_finished()


def test_pi_old_of_a_stage_under_way_is_scored_again(tmp_path: Path) -> None:
    """The stage began with step 4; step 6 needs what was scored then."""
    run = whole_run(tmp_path, schedule=STAGED, committed=8, saved=(3, 4, 5), published=7, policies=(0, 4, 7))
    run.policy_directory(7).rename(tmp_path / "none")
    shutil.rmtree(run.published)
    run.set_published(4)
    damage(run.logprobs / "000006-old.npy")
    assert repaired(run).after.endswith("from step 4")
    damage(run.logprobs / "000002-old.npy")
    assert repaired(run).after.endswith("from step 4"), "that stage is over"


def test_a_stage_whose_first_batch_was_skipped_needs_nothing_that_was_scored(tmp_path: Path) -> None:
    """Weights of step 5 are those with which the stage began: the learner scores it there."""
    run = whole_run(tmp_path, schedule=STAGED, committed=8, saved=(3, 4, 5), published=7, policies=(0, 4, 7))
    shutil.rmtree(run.policy_directory(7))
    shutil.rmtree(run.published)
    run.set_published(4)
    damage(run.batches / "000004.zarr.zip")
    repaired(run)
    for step in (5, 6, 7):
        (run.logprobs / f"{step:06d}-old.npy").unlink()
    assert plan_of(run).after.endswith("from step 4"), "batch 4 was lost after it was trained on"
    run.note_skipped(4)
    assert plan_of(run) == Plan()


@pytest.mark.parametrize(("committed", "after"), [(8, "step 6"), (6, "step 4")])
def test_a_version_that_only_an_older_checkpoint_leads_to_is_published_from_there(
    tmp_path: Path, committed: int, after: str
) -> None:
    """Batches 6 and 7 are sampled with version 4, whose folder is damaged: it is needed unless they are there."""
    run = whole_run(tmp_path, schedule=STAGED, committed=committed, saved=(4, 6), published=6, policies=(0, 4), steps=8)
    shutil.rmtree(run.published)
    run.set_published(4)
    damage(run.policies / "000004")
    assert repaired(run).after.endswith(f"from {after}")


def test_the_published_version_is_named_again(tmp_path: Path) -> None:
    run = whole_run(tmp_path)
    damage(run.published / "000005")
    damage(run.policies / "000005")
    assert becomes(run)["policy/PUBLISHED/000005"] == "written anew: version 5"
    assert becomes(run)["policy/000005"] == "set aside and published again"
    repaired(run)
    assert run.published_version() == 5
    shutil.rmtree(run.published)
    repaired(run)
    assert run.published_version() == 4, "the newest whole policy"


@pytest.mark.parametrize(
    ("spoiled", "found"), [(3, [3, 4, 5]), (4, [4, 5]), (5, [5])], ids=["whole", "delta", "newest delta"]
)
@pytest.mark.parametrize("gone", [False, True], ids=["damaged", "gone"])
def test_versions_that_are_made_from_a_damaged_one_are_set_aside_too(
    tmp_path: Path, spoiled: int, found: list[int], gone: bool
) -> None:
    run, tensors = whole_run(tmp_path, policies=()), drawn(0, count=50)
    write_version(run.policies, 3, tensors)
    for version in (4, 5):
        before, tensors = tensors, moved(tensors, version, share=0.5)
        write_version(run.policies, version, tensors, base=(version - 1, before))
    assert find_damage(run) == []
    shutil.rmtree(run.policy_directory(spoiled)) if gone else damage(run.policy_directory(spoiled))
    assert [one.number for one in find_damage(run)] == (found[1:] if gone else found)
    if not (gone and spoiled == 5):
        repaired(run)


def test_without_any_policy_the_model_folder_is_published_again(tmp_path: Path) -> None:
    run = whole_run(tmp_path)
    for version in (3, 4, 5):
        damage(run.policy_directory(version))
    repaired(run)
    assert not run.is_published()


@contextmanager
def killed_at(at: int) -> Iterator[list[str]]:
    """Fills the list with moments, before and after each change to a folder, and ends with number `at`: a dead process
    changes nothing more, whatever it has in `finally`."""
    moments: list[str] = []

    def reach(moment: str) -> None:
        if len(moments) <= at:
            moments.append(moment)
        if len(moments) > at:
            raise KeyboardInterrupt

    def dying(operation: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any, **options: Any) -> Any:
            reach(f"before {operation.__name__}")
            done = operation(*arguments, **options)
            reach(f"after {operation.__name__}")
            return done

        return act

    with pytest.MonkeyPatch.context() as patched, suppress(KeyboardInterrupt):
        for owner, name in ((Path, "rename"), (Path, "replace"), (Path, "unlink"), (os, "link")):
            patched.setattr(owner, name, dying(getattr(owner, name)))
        yield moments


def test_a_repair_that_is_killed_anywhere_is_done_again(tmp_path: Path) -> None:
    names = ("batches/000001.zarr.zip", "batches/000004.zarr.zip", "policy/PUBLISHED/000005", "checkpoints/000004")
    damaged = whole_run(tmp_path)
    for name in names:
        damage(damaged.path / name)
    struck: list[str] = []
    for kill_at in count():
        run = RunDirectory(shutil.copytree(damaged.path, tmp_path / str(kill_at)))
        with killed_at(kill_at) as moments:
            apply(run, plan_of(run))
        repaired(run)
        assert [lost.index for lost in BatchStore(run.batches).all_lost()] == [1, 4]
        assert run.published_version() == 5
        assert run.saved_steps() == [2]
        assert all((run.path / "damaged" / "000001" / name).exists() for name in names), "nothing is deleted"
        if len(moments) <= kill_at:
            break
        struck.append(moments[kill_at])
    operations = ("rename", "replace", "unlink", "link")
    assert set(struck) == {f"{when} {operation}" for when in ("before", "after") for operation in operations}


def test_a_batch_of_the_end_that_was_learned_from_is_lost_too(tmp_path: Path) -> None:
    """After a power cut the file was gone, though version 5 had been published."""
    run = whole_run(tmp_path, committed=5)
    (run.batches / "000004.zarr.zip").unlink()
    assert becomes(run)["batches/000004.zarr.zip"].startswith("recorded as lost: the engines serve version 5")
    repaired(run)
    assert BatchStore(run.batches).next_index == 5


@pytest.mark.parametrize(
    ("name", "schedule", "after"),
    [("control/000003.json", dict(kind="sync"), "step 2"), ("logprobs/000006-old.npy", STAGED, "step 4")],
)
def test_a_record_that_is_gone_is_as_one_that_is_damaged(
    tmp_path: Path, name: str, schedule: dict[str, Any], after: str
) -> None:
    staged = schedule is STAGED
    run = whole_run(
        tmp_path,
        schedule=schedule,
        committed=8 if staged else 6,
        saved=(3, 4, 5) if staged else (2, 4),
        published=8 if staged else 5,
        policies=(0, 4, 8) if staged else (3, 4, 5),
        controlled=not staged,
    )
    (run.path / name).unlink()
    assert repaired(run).after.endswith(after)
    assert plan_of(run) == Plan()


@pytest.mark.parametrize(
    ("name", "code"),
    [
        *(("batches/000005.zarr.zip", code) for code in (errno.ESTALE, errno.EMFILE, errno.EIO, errno.EACCES)),
        *(("checkpoints/000004/COMMIT", errno.ESTALE), ("policy/000005/weight_check.json", errno.ESTALE)),
        *(("control/000003.json", errno.EMFILE), ("policy/PUBLISHED/000005", errno.ESTALE)),
    ],
)
def test_what_the_machine_fails_to_read_is_no_damage(
    tmp_path: Path, name: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole batch would be sampled anew, and others recorded as lost for good."""
    run = whole_run(tmp_path, controlled=True)
    opened = os.open

    def fails(path: Any, *args: Any, **kwargs: Any) -> int:
        if Path(path) == run.path / name:
            raise OSError(code, os.strerror(code), str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", fails)
    with pytest.raises(OSError, match=name) as raised:
        find_damage(run)
    assert raised.value.errno == code
    if name.startswith("batches"):
        with pytest.raises(OSError, match=name):
            BatchStore(run.batches).read(5, None, choose=lambda whole: Share(ranks=np.zeros(9, np.int64), rank=0))
