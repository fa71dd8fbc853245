"""Batches that are made again though later ones are there, and batches that were lost by damage."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from pipeline.analysis.audit import verify_history
from pipeline.data.batch import Batch
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import LostBatch
from pipeline.errors import StoreError
from pipeline.rewards.pool import Verifiers
from pipeline.rollout.batch_builder import SolvedPromptRule
from pipeline.rollout.collector import Collector
from pipeline.schedule import Schedule
from tests.support.collecting import GROUP, PROMPTS, batches, build, collect, engines_of

STAGED = Schedule(kind="staged", steps=8, updates_per_stage=8)
"""All batches are sampled with version 0, which is served until the last step: any may be made again."""
RULE = SolvedPromptRule(pass_rate=0.9, min_samples=GROUP)


def collector_of(run: RunDirectory, verifiers: Verifiers, schedule: Schedule, **changes: object) -> Collector:
    collector = build(run, verifiers, schedule, num_prompts=15, max_refills=3, solved_rule=RULE, **changes)
    collector._evaluated |= {0, schedule.steps}
    engines_of(collector).solves = lambda digits, member: member == 0 if int(digits[-1]) < 4 else int(digits[-1]) < 7
    return collector


def groups_of(batch: Batch) -> set[int]:
    return {*np.unique(batch.group).tolist(), *(drop.group for drop in batch.dropped)}


@pytest.mark.parametrize(
    ("gone", "informative"),
    [((0,), True), ((3,), False), ((7,), True), ((2, 3, 4), True), ((2, 3, 4), False), ((0, 1, 5), False)],
)
def test_a_hole_is_made_again_with_the_groups_that_it_had(
    run: RunDirectory, verifiers: Verifiers, gone: tuple[int, ...], informative: bool
) -> None:
    """With refills and solved prompts, so that batches take groups of each other's ranges. Made again they need fewer,
    where each group tells its samples apart, or would like to have more, where none does."""
    first = collector_of(run, verifiers, STAGED)
    asyncio.run(asyncio.wait_for(first._collect(), 60))
    before = batches(first.store)
    for index in gone:
        first.store.path(index).unlink()
    again = collector_of(run, verifiers, STAGED)
    engines_of(again).solves = lambda _digits, member: informative and member == 0
    asyncio.run(asyncio.wait_for(again._collect(), 60))
    after = batches(again.store)
    assert [batch.index for batch in after] == list(range(8))
    owners = Counter(group for batch in after for group in groups_of(batch))
    assert set(owners.values()) == {1}
    assert set(owners) == set(range(after[-1].next_group)) - {*after[-1].open_groups}
    assert verify_history(run.path, STAGED, 8, RULE).sound
    for index in set(range(8)) - {*gone}:
        assert groups_of(after[index]) == groups_of(before[index])
    if len(gone) == 1 and gone != (7,):
        assert groups_of(after[gone[0]]) == groups_of(before[gone[0]])


def test_a_hole_that_the_learner_has_passed_is_not_sampled_for_ever(run: RunDirectory, verifiers: Verifiers) -> None:
    """360 samples were asked again in a minute, and each was refused: all were of a version newer than the batch."""
    schedule = Schedule(kind="sync", steps=3)
    collector = build(run, verifiers, schedule)
    store = collect(collector)
    store.path(1).unlink()
    again = build(run, verifiers, replace(schedule, steps=4))
    with pytest.raises(StoreError, match=r"000001.zarr.zip is missing, .*serve version 3.*`evenkeel repair .*as lost"):
        asyncio.run(again.collect())
    assert engines_of(again).asked == []


def test_a_batch_that_is_learned_from_while_it_is_made_again_is_not_sampled_for_ever(
    run: RunDirectory, verifiers: Verifiers
) -> None:
    """The learner had read the newest batch; its file went, the collector began it again, then the learner published
    what it had learned. Every answer was refused from then on, since it was of that version."""
    collector = build(run, verifiers, Schedule(kind="sync", steps=3))

    def published_meanwhile(_digits: str) -> float:
        run.set_published(1)
        return 0.0

    engines_of(collector).latency_s = published_meanwhile
    with pytest.raises(StoreError, match=r"000000.zarr.zip is missing, .*serve version 1.*`evenkeel repair .*as lost"):
        asyncio.run(collector.collect())
    assert len(engines_of(collector).asked) <= 2 * PROMPTS


def test_a_batch_that_a_checkpoint_has_learned_from_is_not_sampled_again(
    run: RunDirectory, verifiers: Verifiers
) -> None:
    """Its version is still served, but what was learned was another batch."""
    collector = collector_of(run, verifiers, STAGED)
    asyncio.run(asyncio.wait_for(collector._collect(), 60))
    (run.checkpoints / "000003").mkdir()
    (run.checkpoints / "000003" / "COMMIT").touch()
    collector.store.path(2).unlink()
    with pytest.raises(StoreError, match=r"the checkpoint of step 3 has learned from it"):
        asyncio.run(collector_of(run, verifiers, STAGED).collect())


def test_the_run_goes_on_behind_a_lost_batch(run: RunDirectory, verifiers: Verifiers) -> None:
    schedule = Schedule(kind="sync", steps=3)
    first = build(run, verifiers, schedule)
    store = collect(first)
    gone = store.read(2, None)
    store.path(2).unlink()
    LostBatch(
        index=2,
        reason="a flipped bit",
        recorded="today",
        learned=True,
        groups=tuple(sorted(groups_of(gone))),
        known="all",
        next_group=gone.next_group,
        open_groups=gone.open_groups,
    ).write(store.lost_path(2))
    longer = replace(schedule, steps=5)
    collect(build(run, verifiers, longer))
    assert store.committed() == [0, 1, 3, 4]
    audit = verify_history(run.path, longer, 5)
    assert audit.sound
    assert [batch.index for batch in audit.damaged] == [2]
    assert (audit.batches, audit.groups) == (4, 5 * PROMPTS)


def test_so_is_the_newest_one(run: RunDirectory, verifiers: Verifiers) -> None:
    """A power cut took it, though version 3 had been published."""
    schedule = Schedule(kind="sync", steps=3)
    collect(build(run, verifiers, schedule)).path(2).unlink()
    again = build(run, verifiers, replace(schedule, steps=4))
    with pytest.raises(StoreError, match=r"000002.zarr.zip is missing, .*serve version 3.*`evenkeel repair .*as lost"):
        asyncio.run(again.collect())
    assert engines_of(again).asked == []
