"""Pass rates over all committed samples of a problem, and when it leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.batch import Batch, DroppedGroup
from pipeline.rollout.solved_prompts import Attempts, SolvedPromptFilter, SolvedPromptRule, attempts

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
        solved_prompts.record(batch_of(make_batch, index, rewards))
        assert solved_prompts.solved(index + 1) == solved


def test_only_batches_below_the_version_count_and_the_retired_stay_away(make_batch: MakeBatch) -> None:
    solved_prompts = SolvedPromptFilter(SolvedPromptRule(pass_rate=1.0, min_samples=3))
    solved_prompts.record(batch_of(make_batch, 0, {1: [1, 1, 1]}))
    # Batches 1 and 2 were under way when problem 1 solved: what they say of it changes nothing.
    solved_prompts.record(batch_of(make_batch, 1, {1: [1, 1, 1], 2: [1, 1, 1]}))
    solved_prompts.record(batch_of(make_batch, 2, {1: [0, 0, 0]}))
    assert solved_prompts.solved(0) == {}
    after_one = solved_prompts.solved(1)
    assert after_one == {1: Attempts(3, 3)}
    assert solved_prompts.solved(2) == solved_prompts.solved(3) == {1: Attempts(3, 3), 2: Attempts(3, 3)}
    assert after_one == {1: Attempts(3, 3)}, "what a batch was told does not change under it"


def test_without_a_rule_nobody_retires(make_batch: MakeBatch) -> None:
    solved_prompts = SolvedPromptFilter(None)
    solved_prompts.record(batch_of(make_batch, 0, {1: [1, 1, 1]}))
    assert solved_prompts.solved(1) == {}


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
        at_once.record(batch)
        stepwise.record(batch)
        if data.draw(st.booleans()):
            stepwise.solved(batch.index + 1)
    assert stepwise.solved(len(batches)) == at_once.solved(len(batches))
