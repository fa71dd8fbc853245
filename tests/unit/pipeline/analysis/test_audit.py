"""The audit finds every way in which batches can be wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.analysis.audit import verify_history
from pipeline.data.batch import Batch, DroppedGroup
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import CorruptBatchError
from pipeline.rollout.batch_builder import SolvedPromptRule
from pipeline.schedule import Schedule

MakeBatch = Callable[..., Batch]
ASYNC = Schedule(kind="async", steps=3, lag=1)


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    return BatchStore(RunDirectory(tmp_path).batches)


def commit_three(store: BatchStore, make_batch: MakeBatch) -> None:
    """Groups 0, 1; 2, 3 and 4 dropped; 5, 6. Two samples with tokens in each group."""
    store.commit(make_batch(0, first_group=0, next_group=2, versions=(0, 0)))
    store.commit(make_batch(1, first_group=2, dropped=(4,), next_group=5, versions=(0, 1)))
    store.commit(make_batch(2, first_group=5, next_group=7, versions=(1, 2, 2)))


def test_a_sound_history(tmp_path: Path, store: BatchStore, make_batch: MakeBatch) -> None:
    commit_three(store, make_batch)
    audit = verify_history(tmp_path, ASYNC, steps=3)
    assert audit.sound
    assert (audit.lost, audit.duplicated, audit.missing, audit.version_violations) == ((), (), (), 0)
    assert (audit.batches, audit.groups, audit.dropped) == (3, 7, 1)
    # By group: [0 0] [0] [0]; [0 1] [0] [0]; [1 2 2] [1] [1]; two groups a batch.
    assert audit.tokens == 2 * (4 + 4 + 5)
    assert audit.lags == {0: 2 * (4 + 1 + 2), 1: 2 * (3 + 3)}


def test_only_the_first_steps_are_read(tmp_path: Path, store: BatchStore, make_batch: MakeBatch) -> None:
    commit_three(store, make_batch)
    audit = verify_history(tmp_path, ASYNC, steps=2)
    assert (audit.batches, audit.groups, audit.sound) == (2, 5, True)


@pytest.mark.parametrize("steps", [2, 6])
def test_an_audit_lists_the_batches_as_often_for_many_as_for_few(
    tmp_path: Path, store: BatchStore, make_batch: MakeBatch, count_listings: Counter[str], steps: int
) -> None:
    """A listing for each batch makes an audit quadratic, on a file system where that takes long."""
    for index in range(steps):
        store.commit(make_batch(index, first_group=2 * index, next_group=2 * index + 2))
    count_listings.clear()
    assert verify_history(tmp_path, ASYNC, steps=steps).batches == steps
    assert count_listings[str(store.directory)] == 2  # what is committed, and what is lost


def test_a_run_without_batches(tmp_path: Path) -> None:
    audit = verify_history(tmp_path, ASYNC, steps=0)
    assert (audit.sound, audit.groups, audit.lags) == (True, 0, {})
    assert verify_history(tmp_path, ASYNC, steps=2).missing == (0, 1)


def test_a_lost_group(tmp_path: Path, store: BatchStore, make_batch: MakeBatch) -> None:
    store.commit(make_batch(0, first_group=1, next_group=4))
    audit = verify_history(tmp_path, ASYNC, steps=1)
    assert (audit.lost, audit.sound) == ((0, 3), False)


@pytest.mark.parametrize(("first_group", "dropped"), [(1, ()), (2, (1,))])
def test_a_group_trained_or_dropped_twice(
    tmp_path: Path, store: BatchStore, make_batch: MakeBatch, first_group: int, dropped: tuple[int, ...]
) -> None:
    store.commit(make_batch(0, first_group=0, next_group=2))
    store.commit(make_batch(1, first_group=first_group, dropped=dropped, next_group=4))
    audit = verify_history(tmp_path, ASYNC, steps=2)
    assert (audit.duplicated, audit.sound) == ((1,), False)


def test_a_group_both_trained_and_dropped_in_one_batch(
    tmp_path: Path, store: BatchStore, make_batch: MakeBatch
) -> None:
    store.commit(make_batch(0, dropped=(1,), next_group=2))
    assert verify_history(tmp_path, ASYNC, steps=1).duplicated == (1,)


def test_groups_that_a_later_batch_has_under_way_are_not_lost(
    tmp_path: Path, store: BatchStore, make_batch: MakeBatch
) -> None:
    store.commit(make_batch(0, first_group=0, next_group=6, open_groups=(2, 3, 5)))
    audit = verify_history(tmp_path, ASYNC, steps=1)
    assert (audit.lost, audit.sound) == ((4,), False)
    store.commit(make_batch(1, first_group=4, next_group=8, open_groups=(2, 3, 6, 7)))
    assert verify_history(tmp_path, ASYNC, steps=2).sound
    store.commit(make_batch(2, first_group=2, next_group=8, open_groups=(4, 6, 7)))
    audit = verify_history(tmp_path, ASYNC, steps=3)
    assert (audit.duplicated, audit.sound) == ((4,), False), "group 4 is committed, and would be asked again"


RETIREMENT = SolvedPromptRule(pass_rate=0.5, min_samples=3)


def with_problems(batch: Batch, *drops: DroppedGroup) -> Batch:
    """Group g asks problem g % 2; one of its three samples is right, and all of problem 1's."""
    problem = batch.group % 2
    reward = np.where(problem == 1, np.float32(1.0), batch.reward)
    return replace(batch, problem=problem, reward=reward, dropped=drops)


def test_problems_must_retire_when_their_pass_rate_says_so(
    tmp_path: Path, store: BatchStore, make_batch: MakeBatch
) -> None:
    """Sync. Batch 0 asks problems 0 and 1; 1 is solved in 3 of 3 samples and is not asked from batch 1 on."""
    sync = Schedule(kind="sync", steps=3)
    passed_over = DroppedGroup(group=3, reason="solved", kind="solved", problem=1)
    store.commit(with_problems(make_batch(0, first_group=0)))
    store.commit(with_problems(make_batch(1, first_group=2, num_groups=1, next_group=4, versions=(1,)), passed_over))
    audit = verify_history(tmp_path, sync, 2, RETIREMENT)
    assert (audit.solved_violations, audit.solved, audit.dropped) == ((), 1, 1)
    assert verify_history(tmp_path, sync, 2).solved_violations == (3,), "no problem counts as solved in such a run"
    store.commit(
        with_problems(
            make_batch(2, first_group=5, num_groups=1, next_group=8, versions=(2,)),
            DroppedGroup(group=4, reason="solved", kind="solved", problem=0),
            DroppedGroup(group=6, reason="too long", problem=0),
            DroppedGroup(group=7, reason="all right", kind="zero_variance", problem=1, samples=3, solved=3),
        )
    )
    audit = verify_history(tmp_path, sync, 3, RETIREMENT)
    # Group 4 asks problem 0 (1 of 3 right: not solved); groups 5 and 7 ask problem 1, which is solved.
    assert (audit.solved_violations, audit.sound) == ((4, 5, 7), False)
    assert (audit.solved, audit.unfit, audit.zero_variance, audit.dropped) == (2, 1, 1, 4)


def test_the_lag_says_which_batches_a_verdict_rests_on(
    tmp_path: Path, store: BatchStore, make_batch: MakeBatch
) -> None:
    """Lag 1: batch 1 was begun on version 0, before anything was known of batch 0."""
    store.commit(with_problems(make_batch(0, first_group=0)))
    store.commit(with_problems(make_batch(1, first_group=2)))
    assert verify_history(tmp_path, ASYNC, 2, RETIREMENT).solved_violations == ()
    assert verify_history(tmp_path, Schedule(kind="sync", steps=3), 2, RETIREMENT).solved_violations == (3,)


def test_a_missing_batch(tmp_path: Path, store: BatchStore, make_batch: MakeBatch) -> None:
    commit_three(store, make_batch)
    store.path(1).unlink()
    audit = verify_history(tmp_path, ASYNC, steps=3)
    assert (audit.missing, audit.lost, audit.sound) == ((1,), (2, 3, 4), False)


@pytest.mark.parametrize(
    ("schedule", "violations"),
    [
        (Schedule(kind="async", steps=3, lag=2), 0),
        (Schedule(kind="async", steps=3, lag=1), 0),
        (Schedule(kind="sync", steps=3), 2 * (3 + 3)),
        (Schedule(kind="staged", steps=4, updates_per_stage=2), 2 * 3),
    ],
)
def test_tokens_staler_than_agreed(
    tmp_path: Path, store: BatchStore, make_batch: MakeBatch, schedule: Schedule, violations: int
) -> None:
    commit_three(store, make_batch)
    assert verify_history(tmp_path, schedule, steps=3).version_violations == violations


def test_tokens_from_the_future(tmp_path: Path, store: BatchStore, make_batch: MakeBatch) -> None:
    batch = make_batch(0)
    store.commit(replace(batch, policy_version=np.full_like(batch.policy_version, 1)))
    audit = verify_history(tmp_path, ASYNC, steps=1)
    assert (audit.version_violations, audit.lags) == (10, {-1: 10})


def test_a_damaged_batch_is_an_error(tmp_path: Path, store: BatchStore, make_batch: MakeBatch) -> None:
    commit_three(store, make_batch)
    store.path(1).write_bytes(store.path(1).read_bytes()[:-30])
    with pytest.raises(CorruptBatchError, match=r"000001\.zarr\.zip"):
        verify_history(tmp_path, ASYNC, steps=3)
