"""Old batches leave when the recipe says so and no checkpoint needs them; what a reader then finds is no damage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launch.fork.fork import fork_run
from launch.run.replay import replay_run
from launch.verify.history import check_history
from pipeline.analysis.audit import verify_history
from pipeline.data.batch import SOLVED_REWARD
from pipeline.data.checksums import list_checksums
from pipeline.data.run_directory import RunDirectory, numbered_files
from pipeline.data.run_recipes import add_recipe
from pipeline.data.store import BatchStore, LostBatch, RemovedBatch, entry
from pipeline.errors import RunConflictError, StoreError, SupersededError
from pipeline.repair import apply, find_damage, plan_repair
from pipeline.rollout.batch_builder import attempts
from pipeline.trainer.retention import Retention
from tests.support.whole_runs import damage, whole_run


def retention(run: RunDirectory, batches: int | None = None, logprobs: int | None = None) -> Retention:
    return Retention(run=run, keep_batches=batches, keep_logprobs=logprobs, solved_at=SOLVED_REWARD)


def scored(run: RunDirectory) -> list[int]:
    return [*numbered_files(run.logprobs, ".npy")]


@pytest.mark.parametrize(
    ("saved", "keep", "first"),
    [((2, 4), 1, 2), ((2, 4), 3, 1), ((4,), 1, 3), ((4,), 4, 0), ((4,), 9, 0), ((), 1, 0), ((2, 4), None, 0)],
)
def test_the_newest_learned_batches_stay_and_all_that_a_checkpoint_may_train_again(
    tmp_path: Path, saved: tuple[int, ...], keep: int | None, first: int
) -> None:
    run = whole_run(tmp_path, saved=saved)
    retention(run, keep).apply()
    store = BatchStore(run.batches)
    assert (store.removed(), store.committed()) == ([*range(first)], [*range(first, 6)])
    assert scored(run) == [*range(first, 5)]
    assert [store.path(index).exists() for index in range(6)] == [False] * first + [True] * (6 - first)


def test_log_probabilities_leave_alone(tmp_path: Path) -> None:
    staged = dict(kind="staged", updates_per_stage=2)
    run = whole_run(tmp_path, schedule=staged, published=6, policies=(4, 6), saved=(4,))
    retention(run, logprobs=2).apply()
    assert BatchStore(run.batches).committed() == [*range(6)]
    assert (scored(run), [*numbered_files(run.logprobs, "-old.npy")]) == ([2, 3, 4, 5], [2, 3, 4, 5])


def test_a_removed_batch_keeps_its_place_its_groups_and_its_attempts(tmp_path: Path) -> None:
    run = whole_run(tmp_path)
    store, schedule = BatchStore(run.batches), run.recipe().build_schedule()
    entries, checksums = [entry(store, index) for index in range(6)], [store.checksum(index) for index in range(6)]
    tried, before = attempts(store.read(1, None), SOLVED_REWARD), verify_history(run.path, schedule, 6)
    retention(run, 1).apply()
    removed = store.gone(1)
    assert isinstance(removed, RemovedBatch)
    assert [(one.groups, one.next_group, one.open_groups) for one in (entry(store, i) for i in range(6))] == [
        (one.groups, one.next_group, one.open_groups) for one in entries
    ]
    assert [store.checksum(index) for index in range(6)] == checksums
    assert attempts(removed, SOLVED_REWARD) == tried
    assert (store.settled(), store.next_index, store.holes(8)) == ([*range(6)], 6, [])
    audit = verify_history(run.path, schedule, 6)
    assert audit == replace(before, removed=(0, 1), batches=4, tokens=audit.tokens, lags=audit.lags)
    assert audit.sound


def test_a_history_with_removed_batches_is_whole(tmp_path: Path) -> None:
    run = whole_run(tmp_path)
    recipe = run.recipe()
    kept = recipe.model_copy(update=dict(run=recipe.run.model_copy(update=dict(keep_batches=1))))
    add_recipe(run.path, kept, first_step=4, first_batch=6)
    retention(run, 1).apply()
    found = check_history(run.path)
    assert (found["removed_batches"], found["missing_batches"], found["without_record"]) == (2, 2, {})
    assert found["damaged"] == []
    (run.logprobs / "000003.npy").unlink()
    assert check_history(run.path)["without_record"] == {"logprobs": [3]}, "a later one is missed"


def test_a_reader_is_told_who_removed_a_batch(tmp_path: Path) -> None:
    run = whole_run(tmp_path)
    retention(run, 1).apply()
    with pytest.raises(StoreError, match=r"batch 1 was removed by run\.keep_batches, after .* nothing to read"):
        BatchStore(run.batches).read(1, None, visible_s=60.0)


def test_a_replay_of_what_was_removed_is_refused(tmp_path: Path) -> None:
    run = whole_run(tmp_path, steps=4, committed=4, published=4, policies=(4,))
    run.model.mkdir()
    run.model_manifest.write_text('{"tensors": {}}')
    list_checksums(run.model)
    retention(run, 1).apply()
    with pytest.raises(
        StoreError, match=r"batch 0 was removed by run\.keep_batches.*steps from 0 on cannot be repeated"
    ):
        replay_run(run.path, [])
    assert not run.path.with_name("run-replay").exists()


def test_a_removal_that_was_killed_is_finished_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the records, before the files went: they count as removed at once."""
    run, store = whole_run(tmp_path), BatchStore(tmp_path / "run/batches")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", interrupted)
        with pytest.raises(KeyboardInterrupt):
            retention(run, 1).apply()
    assert store.path(0).exists()
    assert (store.committed(), find_damage(run)) == ([2, 3, 4, 5], [])
    retention(run).apply()  # also where the key was taken out since
    assert not store.path(0).exists()
    assert store.removed() == [0, 1]


def interrupted(path: Path, missing_ok: bool = False) -> None:
    if path.suffixes == [".zarr", ".zip"]:
        raise KeyboardInterrupt
    path.rename(path.with_name(f".{path.name}.gone"))


def test_a_superseded_learner_removes_nothing(tmp_path: Path) -> None:
    def superseded() -> None:
        raise SupersededError("by another")

    run = whole_run(tmp_path)
    with pytest.raises(SupersededError):
        retention(replace(run, fence=superseded), 1, 1).apply()
    assert (BatchStore(run.batches).committed(), scored(run)) == ([*range(6)], [*range(5)])


def test_a_damaged_batch_stays_for_the_repair(tmp_path: Path) -> None:
    run = whole_run(tmp_path)
    damage(run.batches / "000000.zarr.zip")
    retention(run, 1).apply()
    store = BatchStore(run.batches)
    assert (store.removed(), store.committed()) == ([1], [0, 2, 3, 4, 5])
    apply(run, plan_repair(run, find_damage(run), "now"))
    lost = store.gone(0)
    assert isinstance(lost, LostBatch)
    assert (lost.groups, lost.known) == ((0, 1), "all")


def test_a_damaged_record_becomes_that_of_a_loss(tmp_path: Path) -> None:
    run = whole_run(tmp_path)
    retention(run, 1).apply()
    store = BatchStore(run.batches)
    groups = entry(store, 1).groups
    damage(store.removed_path(1))
    apply(run, plan_repair(run, find_damage(run), "now"))
    lost = store.gone(1)
    assert isinstance(lost, LostBatch)
    assert (lost.groups, lost.learned, store.removed()) == (groups, True, [0])
    assert find_damage(run) == []


def test_a_run_that_would_train_a_removed_batch_again_cannot_be_repaired(tmp_path: Path) -> None:
    run = whole_run(tmp_path)
    retention(run, 1).apply()
    damage(run.checkpoints / "000004")
    assert [str(one.path.name) for one in plan_repair(run, find_damage(run), "now").repairs] == ["000004"]
    damage(run.checkpoints / "000002")
    with pytest.raises(
        RunConflictError, match=r"no whole checkpoint .* batches up to 1 were removed by run\.keep_batch"
    ):
        plan_repair(run, find_damage(run), "now")


def test_a_fork_has_batches_of_its_own_and_the_records_of_those_removed(tmp_path: Path) -> None:
    run = whole_run(tmp_path)
    early = RunDirectory(Path(fork_run(run.path, Path("early"), 4)["run"]))
    retention(run, 1).apply()
    late = RunDirectory(Path(fork_run(run.path, Path("late"), 4)["run"]))
    assert BatchStore(early.batches).committed() == [0, 1, 2, 3]
    store = BatchStore(late.batches)
    assert (store.removed(), store.committed(), store.groups_to_ask()) == ([0, 1], [2, 3], (8, ()))
    assert check_history(late.path)["damaged"] == []
    retention(late, 1).apply()
    assert (store.removed(), BatchStore(run.batches).committed()) == ([0, 1, 2], [2, 3, 4, 5])
