"""Every group has one owner, whichever batch asks when, and wherever the collector dies."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.analysis.audit import verify_history
from pipeline.data.batch import VERIFIER_FAILED, Batch, Completion, DroppedGroup, Group, Prompt, Sample
from pipeline.data.event_log import read_events
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RewardError
from pipeline.rewards.pool import Verifiers
from pipeline.rollout.batch_builder import (
    Attempts,
    GroupAllocator,
    GroupFilter,
    SolvedPromptFilter,
    SolvedPromptRule,
    attempts,
)
from pipeline.schedule import Schedule
from tests.support.collecting import GROUP, PROMPTS, batches, build, collect, engines_of


def test_golden() -> None:
    """Batches 0 and 1 take two groups each, 0 a third; 0 is committed, then the collector dies."""
    allocator = GroupAllocator(0, ())
    assert [allocator.take(batch) for batch in (0, 0, 1, 1, 0)] == [0, 1, 2, 3, 4]
    next_group, open_groups = allocator.close_batch(0)
    assert (next_group, open_groups) == (5, (2, 3))
    again = GroupAllocator(next_group, open_groups)
    assert [again.take(1) for _ in range(2)] == [2, 3]
    assert again.take(2) == 5
    assert again.close_batch(1) == (6, (5,))


def test_what_is_not_taken_up_at_once_stays_open() -> None:
    allocator = GroupAllocator(9, (7, 3))
    assert allocator.take(4) == 3
    assert allocator.close_batch(4) == (9, (7,))


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["take", "take", "commit", "die"])), max_size=80))
def test_nothing_is_lost_and_nothing_is_taken_twice(actions: list[tuple[int, str]]) -> None:
    """Batches are committed in order; the oldest three are under way; a death forgets all but what was committed."""
    allocator, stored = GroupAllocator(0, ()), (0, ())
    committed: list[set[int]] = []
    under_way: dict[int, set[int]] = {}
    for offset, action in actions:
        batch = len(committed) + offset
        if action == "take":
            group = allocator.take(batch)
            assert all(group not in groups for groups in [*committed, *under_way.values()])
            under_way.setdefault(batch, set()).add(group)
        elif action == "commit" and len(committed) in under_way:
            stored = allocator.close_batch(len(committed))
            committed.append(under_way.pop(len(committed)))
        elif action == "die":
            allocator, under_way = GroupAllocator(*stored), {}
        next_group, open_groups = stored
        seen = [group for groups in committed for group in groups]
        assert sorted([*seen, *open_groups]) == list(range(next_group))


SYNC = Schedule(kind="sync", steps=3)
GROUP_OF_TWO = Group(
    prompt=Prompt(group=7, text="1=", answer="1", tokens=(1, 2), metadata=dict(level="easy")),
    samples=(
        Sample(completion=Completion.given([3, 4], [-0.5, -0.5]), reward=0.5, reward_parts=dict(brief=1.0)),
        Sample(completion=Completion.given([5], [-0.5]), reward=0.0, reward_parts={VERIFIER_FAILED: 1.0}),
    ),
)


def filter_of(function: Callable[..., Any], *names: str, deadline_s: float = 20.0) -> GroupFilter:
    return GroupFilter("mine:own", function, frozenset(names), deadline_s)


def asked(given: GroupFilter) -> bool:
    return asyncio.run(given.keeps(GROUP_OF_TWO, lambda completion: f"<{completion.tokens.tolist()}>"))


def test_what_is_neither_true_nor_false_ends_the_run() -> None:
    with pytest.raises(RewardError, match=r"mine:own returned 'yes' for group 7, expected True or False; correct it"):
        asked(filter_of(lambda **_: "yes"))


def test_an_exception_ends_the_run() -> None:
    def broken(rewards: list[float | None]) -> bool:
        return sum(rewards) > 0  # type: ignore[arg-type]

    with pytest.raises(RewardError, match=r"mine:own failed on group 7 \(TypeError: unsupported operand.*correct it"):
        asked(filter_of(broken, "rewards"))
    with pytest.raises(RewardError, match=r"RuntimeError: StopIteration"):
        asked(filter_of(lambda **_: next(iter(()))))


def test_a_function_that_hangs_ends_the_run() -> None:
    release = threading.Event()
    try:
        with pytest.raises(RewardError, match=r"took more than 0.05 s for group 7.*raise reward.deadline_s"):
            asked(filter_of(lambda **_: release.wait(60), deadline_s=0.05))
    finally:
        release.set()


def even(prompt: str) -> bool:
    return int(prompt.removesuffix("=")[-1]) % 2 == 0


def test_a_dropped_group_is_replaced_counted_and_in_the_ledger(run: RunDirectory, verifiers: Verifiers) -> None:
    collector = build(run, verifiers, SYNC, max_refills=20, keeps_equal=True)
    collector.group_filter = filter_of(even, "prompt")
    found = batches(collect(collector))
    text = {group: collector.prompts.prompt(group).text for group in range(found[-1].next_group)}
    for batch, event in zip(found, read_events(run.path, "committed"), strict=True):
        assert len(set(batch.group.tolist())) == PROMPTS, "all rewards are equal, and they are kept"
        assert all(even(text[group]) for group in batch.group.tolist())
        assert not any(even(text[drop.group]) for drop in batch.dropped)
        assert {(drop.kind, drop.samples, drop.solved) for drop in batch.dropped} <= {("filtered", GROUP, GROUP)}
        assert event["filtered"] == event["refills"] == len(batch.dropped)
        assert (event["dropped"], event["zero_variance_dropped"]) == (0, 0)
        assert event["zero_variance"] == PROMPTS + len(batch.dropped), "all are equal, kept or not"
    assert sum(len(batch.dropped) for batch in found) > 0
    assert verify_history(run.path, SYNC, SYNC.steps).sound


def test_past_the_bound_the_batch_is_smaller(run: RunDirectory, verifiers: Verifiers) -> None:
    """Of 3 × (1 + 1) groups a batch those of the first two numbers are kept, which no other group fills up."""
    schedule = Schedule(kind="sync", steps=1)
    collector = build(run, verifiers, schedule, max_refills=1, evaluate_every=100)
    engines_of(collector).solves = lambda digits, member: member == 0
    kept = [collector.prompts.prompt(group).text for group in range(2)]
    collector.group_filter = filter_of(lambda prompt: prompt in kept, "prompt")
    [batch] = batches(collect(collector))
    assert sorted({*batch.group.tolist()}) == [0, 1]
    assert len(batch.dropped) == 4
    assert verify_history(run.path, schedule, 1).sound


def test_a_filter_that_keeps_nothing_ends_the_run(run: RunDirectory, verifiers: Verifiers) -> None:
    collector = build(run, verifiers, SYNC, max_refills=2)
    collector.group_filter = filter_of(lambda **_: False)
    with pytest.raises(RewardError, match=r"kept none of the 9 groups that were sampled for batch 0; correct it, or"):
        collect(collector)


MakeBatch = Callable[..., Batch]


def batch_of(make_batch: MakeBatch, index: int, rewards: Mapping[int, list[float]], *drops: DroppedGroup) -> Batch:
    """A batch whose samples of problem p have `rewards[p]`; their number must be a multiple of 3."""
    problem = np.array([p for p, values in rewards.items() for _ in values], np.int64)
    reward = np.array([value for values in rewards.values() for value in values], np.float32)
    batch = make_batch(index, num_groups=len(problem) // 3)
    return replace(batch, problem=problem, reward=reward, dropped=drops)


def test_attempts_of_a_batch(make_batch: MakeBatch) -> None:
    """Samples that were dropped for zero variance count; a dropped prompt without samples, and unknown ones, do not."""
    drops = (
        DroppedGroup(group=7, reason="all right", kind="zero_variance", problem=5, samples=3, solved=3),
        DroppedGroup(group=8, reason="all wrong", kind="zero_variance", problem=9, samples=3, solved=0),
        DroppedGroup(group=9, reason="too long", problem=2),
    )
    batch = batch_of(make_batch, 0, {5: [1.0, 0.5, 2.0], -1: [1.0, 1.0, 1.0], 6: [-1.0, -1.0, 1.0]}, *drops)
    assert attempts(batch, 1.0) == {5: Attempts(6, 5), 6: Attempts(3, 1), 9: Attempts(3, 0)}


def test_it_takes_enough_samples_and_a_high_enough_rate(make_batch: MakeBatch) -> None:
    """At least 6 samples, at least 5 of 6 solved. Problem 1: 3/3, 5/6, gone. Problem 2: 2/3, 4/6, 7/9, 10/12, gone."""
    solved_prompts = SolvedPromptFilter(SolvedPromptRule(pass_rate=5 / 6, min_samples=6))
    rows = [
        ({1: [1, 1, 1], 2: [1, 1, 0]}, {}),
        ({1: [1, 0, 1], 2: [1, 1, 0]}, {1: Attempts(6, 5)}),
        ({2: [1, 1, 1]}, {1: Attempts(6, 5)}),
        ({2: [1, 1, 1]}, {1: Attempts(6, 5), 2: Attempts(12, 10)}),
    ]
    for index, (rewards, solved) in enumerate(rows):
        solved_prompts.record(index, attempts(batch_of(make_batch, index, rewards), 1.0))
        assert solved_prompts.solved(index + 1) == solved


def test_only_batches_below_the_version_count_and_the_retired_stay_away(make_batch: MakeBatch) -> None:
    solved_prompts = SolvedPromptFilter(SolvedPromptRule(pass_rate=1.0, min_samples=3))
    solved_prompts.record(0, attempts(batch_of(make_batch, 0, {1: [1, 1, 1]}), 1.0))
    # Batches 1 and 2 were under way when problem 1 solved: what they say of it changes nothing.
    solved_prompts.record(1, attempts(batch_of(make_batch, 1, {1: [1, 1, 1], 2: [1, 1, 1]}), 1.0))
    solved_prompts.record(2, attempts(batch_of(make_batch, 2, {1: [0, 0, 0]}), 1.0))
    assert solved_prompts.solved(0) == {}
    after_one = solved_prompts.solved(1)
    assert after_one == {1: Attempts(3, 3)}
    assert solved_prompts.solved(2) == solved_prompts.solved(3) == {1: Attempts(3, 3), 2: Attempts(3, 3)}
    assert after_one == {1: Attempts(3, 3)}, "what a batch was told does not change under it"


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=4), max_size=8), st.data())
def test_when_it_is_asked_does_not_matter(
    make_batch: MakeBatch, history: list[list[tuple[int, bool]]], data: st.DataObject
) -> None:
    """Recorded all at once and asked once, or step by step: the same verdict."""
    rule = SolvedPromptRule(pass_rate=0.7, min_samples=4)
    batches = []
    for index, groups in enumerate(history):
        rewards: dict[int, list[float]] = {}
        for problem, solved in groups:
            rewards[problem] = [*rewards.get(problem, []), 1.0, 1.0, float(solved)]
        batches.append(batch_of(make_batch, index, rewards))
    at_once, stepwise = SolvedPromptFilter(rule), SolvedPromptFilter(rule)
    for batch in batches:
        at_once.record(batch.index, attempts(batch, 1.0))
        stepwise.record(batch.index, attempts(batch, 1.0))
        if data.draw(st.booleans()):
            stepwise.solved(batch.index + 1)
    assert stepwise.solved(len(batches)) == at_once.solved(len(batches))
