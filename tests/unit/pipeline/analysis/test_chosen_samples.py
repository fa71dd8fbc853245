"""Which samples a page shows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline.analysis.pages.chosen_samples import choose, pick, shares_of, spread_over, worst_gaps
from tests.support.batches import batch_of_rewards

NEVER = -np.inf


@pytest.mark.parametrize(
    ("indices", "expected"),
    [([], []), ([7], [7]), ([0, 3, 4], [0, 3, 4]), (list(range(11)), [0, 2, 4, 6, 8, 10])],
)
def test_batches_at_equal_distances_with_the_first_and_the_last(indices: list[int], expected: list[int]) -> None:
    assert spread_over(indices) == expected


def test_each_measure_takes_its_highest_in_turn_and_the_rest_are_the_first() -> None:
    by_gap, by_length = [1.0, 0.0, 3.0, 2.0, 0.0], [NEVER, NEVER, NEVER, NEVER, 9.0]
    assert pick([by_gap, by_length], 5, 3) == [0, 2, 4]
    assert pick([by_gap, by_length], 5, 4) == [0, 2, 3, 4]
    assert pick([by_gap, by_length], 5, 9) == [0, 1, 2, 3, 4]
    assert pick([[NEVER, NEVER]], 2, 1) == [0]


def test_short_responses_leave_their_share_to_long_ones() -> None:
    assert shares_of([2, 2, 100, 100], 24) == 10
    assert shares_of([2, 3], 100) == 3
    assert shares_of([], 100) == 0


def test_the_widest_spread_the_truncated_and_the_worst_token_are_among_the_groups() -> None:
    batch = batch_of_rewards([[0.5, 0.5]] * 6 + [[0.0, 1.0], [0.5, 0.5], [0.5, 0.5]])
    truncated = np.zeros(18, np.bool_)
    truncated[15] = True
    batch = replace(batch, truncated=truncated)
    learner = batch.rollout_logprobs.copy()
    learner[batch.response_offsets[16]] -= 2.0
    chosen = choose(batch, learner)
    assert list(chosen.groups) == [0, 6, 7, 8]
    assert chosen.num_groups == 9
    assert (chosen.groups[6].reward_spread, chosen.groups[7].num_truncated) == (1.0, 1)
    assert chosen.groups[8].worst_gap == pytest.approx(2.0)
    assert chosen.batch.group.tolist() == [0, 0, 6, 6, 7, 7, 8, 8]
    assert chosen.learner_logprobs is not None
    assert np.flatnonzero(chosen.learner_logprobs != chosen.batch.rollout_logprobs).tolist() == [
        int(chosen.batch.response_offsets[6])
    ]


def test_of_a_large_group_the_best_the_worst_and_the_truncated_are_shown() -> None:
    rewards = [0.5] * 20
    rewards[18], rewards[13] = 1.0, 0.0
    batch = batch_of_rewards([rewards])
    truncated = np.zeros(20, np.bool_)
    truncated[16] = True
    chosen = choose(replace(batch, truncated=truncated), None)
    assert chosen.groups[0].num_samples == 20
    assert chosen.batch.num_samples == 8
    assert {0.0, 1.0} < set(chosen.batch.reward.tolist())
    assert chosen.batch.truncated.any()
    assert chosen.groups[0].worst_gap is None


def test_a_gap_that_is_not_finite_is_the_worst_and_unsampled_tokens_have_none() -> None:
    batch = batch_of_rewards([[0.0, 1.0]], unsampled=0.5, seed=3)
    learner = np.where(batch.loss_mask, batch.rollout_logprobs + 0.25, 99.0).astype(np.float32)
    learner[batch.response_offsets[1]] = -np.inf
    gaps = worst_gaps(batch, learner)
    assert gaps is not None
    assert not batch.loss_mask.all()
    assert gaps.tolist() == [pytest.approx(0.25), np.inf]


def test_what_the_learner_has_not_looked_at_is_no_mismatch() -> None:
    batch = batch_of_rewards([[1.0, 1.0]] * 5 + [[0.0, 1.0]])
    learner = batch.rollout_logprobs.copy()
    learner[: batch.response_offsets[10]] = np.nan
    learner[batch.response_offsets[11]] += 0.5
    gaps = worst_gaps(batch, learner)
    assert gaps is not None
    assert gaps.tolist() == [NEVER] * 10 + [0.0, pytest.approx(0.5)]
    chosen = choose(batch, learner)
    assert list(chosen.groups) == [0, 1, 2, 5]
    assert [facts.worst_gap for facts in chosen.groups.values()] == [None, None, None, pytest.approx(0.5)]
