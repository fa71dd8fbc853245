"""Which samples of a run a page shows: some batches, of each some groups, and of each group some samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from pipeline.data.batch import Batch
from pipeline.ports.learner import looked_at

MOST_BATCHES, MOST_GROUPS, MOST_SAMPLES = 6, 4, 8
"""Of a run, of a batch, of a group: siblings fit beside one another, and a page can be looked through."""


@dataclass(frozen=True, kw_only=True)
class GroupFacts:
    """All samples of a group, whether they are shown or not."""

    num_samples: int
    num_truncated: int
    reward_spread: float
    """Highest minus lowest reward; 0 where fewer than two samples have one."""
    worst_gap: float | None
    """The largest |learner - engine| of a token, nats; None where the learner looked at none."""


@dataclass(frozen=True, kw_only=True)
class ChosenSamples:
    """What is shown of one batch."""

    batch: Batch
    """Of these samples alone."""
    learner_logprobs: NDArray[np.float32] | None
    """[responses] of these samples; None where the learner has not met the batch."""
    advantages: NDArray[np.float64] | None
    """[samples] of these alone; None where they are not known."""
    num_groups: int
    """Of the whole batch."""
    groups: dict[int, GroupFacts]
    """Of the groups that are shown."""


def spread_over(indices: Sequence[int]) -> list[int]:
    """At most MOST_BATCHES of them at equal distances, with the first and the last."""
    places = np.linspace(0, len(indices) - 1, min(len(indices), MOST_BATCHES)).round().astype(int)
    return [indices[place] for place in places.tolist()]


def choose(
    batch: Batch, learner_logprobs: NDArray[np.float32] | None, advantages: NDArray[np.float64] | None = None
) -> ChosenSamples:
    """Groups by worst token, spread of rewards and truncated responses, then the first ones; of their samples those
    with the worst token, the highest and the lowest reward and the truncated ones, then the first."""
    gaps = worst_gaps(batch, learner_logprobs)
    borders = 1 + np.flatnonzero(batch.group[1:] != batch.group[:-1])
    spans = [span for span in np.split(np.arange(batch.num_samples), borders) if len(span)]
    facts = [_facts(batch, gaps, span) for span in spans]
    measures = [
        [_or_never(one.worst_gap) for one in facts],
        [_or_never(one.reward_spread) for one in facts],
        [_or_never(one.num_truncated) for one in facts],
    ]
    groups = pick(measures, len(facts), MOST_GROUPS)
    chosen = np.zeros(batch.num_samples, np.bool_)
    for group in groups:
        span = spans[group]
        reward = np.where(batch.judged[span], batch.reward[span], -np.inf).tolist()
        lowest = np.where(batch.judged[span], -batch.reward[span], -np.inf).tolist()
        worst = [] if gaps is None else [gaps[span].tolist()]
        truncated = [_or_never(one) for one in batch.truncated[span].tolist()]
        chosen[span[pick([*worst, reward, lowest, truncated], len(span), MOST_SAMPLES)]] = True
    of_responses = np.repeat(chosen, batch.response_lengths)
    return ChosenSamples(
        batch=batch.select(chosen),
        learner_logprobs=None if learner_logprobs is None else learner_logprobs[of_responses],
        advantages=None if advantages is None else advantages[chosen],
        num_groups=len(facts),
        groups={int(batch.group[spans[group][0]]): facts[group] for group in groups},
    )


def pick(measures: Sequence[Sequence[float]], size: int, most: int) -> list[int]:
    """Places of `most` of `size` items, ascending. In turn each measure takes its highest, and the last turn of a round
    is the first's in their order. What is -inf is never taken for its measure."""
    ranked = [
        [
            place
            for place in np.argsort(-np.array(values, np.float64), kind="stable").tolist()
            if values[place] > -np.inf
        ]
        for values in measures
    ]
    taken: dict[int, None] = {}
    for round_ in zip_longest(*ranked, range(size)):
        for place in round_:
            if place is not None and len(taken) < most:
                taken.setdefault(place)
    return sorted(taken)


def worst_gaps(batch: Batch, learner_logprobs: NDArray[np.float32] | None) -> NDArray[np.float64] | None:
    """[n] the largest of `token_gaps` of each sample, nats; -inf where the learner looked at no token of it."""
    if learner_logprobs is None:
        return None
    worst, looked = np.full(batch.num_samples, -np.inf), looked_at(batch, learner_logprobs)
    sample = np.repeat(np.arange(batch.num_samples), batch.response_lengths)
    np.maximum.at(worst, sample[looked], token_gaps(batch, learner_logprobs)[looked])
    return worst


def token_gaps(batch: Batch, learner_logprobs: NDArray[np.float32]) -> NDArray[np.float64]:
    """[responses] |learner - engine|, nats: 0 for a token that no engine sampled or that the learner did not look at,
    inf where it is not finite."""
    with np.errstate(invalid="ignore"):
        gaps = np.abs(learner_logprobs.astype(np.float64) - batch.rollout_logprobs)
    return np.where(looked_at(batch, learner_logprobs), np.where(np.isfinite(gaps), gaps, np.inf), 0.0)


def shares_of(lengths: Sequence[int], most: int) -> int:
    """How much of each may be shown so that it is `most` in all: short ones leave their rest to long ones."""
    left = most
    for count, length in zip(range(len(lengths), 0, -1), sorted(lengths), strict=True):
        if length * count > left:
            return left // count
        left -= length
    return max(lengths, default=0)


def _facts(batch: Batch, gaps: NDArray[np.float64] | None, span: NDArray[np.int64]) -> GroupFacts:
    rewards = batch.reward[span][batch.judged[span]]
    worst = -np.inf if gaps is None else float(gaps[span].max())
    return GroupFacts(
        num_samples=len(span),
        num_truncated=int(np.count_nonzero(batch.truncated[span])),
        reward_spread=float(np.ptp(rewards)) if len(rewards) else 0.0,
        worst_gap=None if worst == -np.inf else worst,
    )


def _or_never(value: float | None) -> float:
    """What is 0 or unknown ranks nothing."""
    return value or -np.inf
