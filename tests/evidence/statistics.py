"""Numbers with intervals: a bootstrap over seeds and, within a seed, over held-out prompts.

A curve is pass@k of each prompt at each evaluation, [seeds, evaluations, prompts]. A draw takes as many seeds as there
are, with replacement, and for each as many prompts as there are, with replacement; the same prompts at every evaluation
and, in comparisons, the same seeds and prompts for both arms, which share them. Intervals are percentiles of the draws.
With two seeds the spread between seeds is known badly: read the intervals as "these seeds, other prompts" at least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

NUM_DRAWS = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval; `high` may be infinite (a target that some draws never reach)."""

    value: float
    low: float
    high: float


@lru_cache(maxsize=8)
def draw_weights(num_seeds: int, num_prompts: int, *, num_draws: int = NUM_DRAWS) -> Array:
    """[draws, seeds, prompts]: how often each prompt counts in each draw, summing to 1; the same for the same sizes."""
    rng = np.random.default_rng(0)
    seeds = rng.integers(num_seeds, size=(num_draws, num_seeds))
    prompts = rng.integers(num_prompts, size=(num_draws, num_seeds, num_prompts))
    weights = np.zeros((num_draws, num_seeds, num_prompts))
    draws = np.arange(num_draws)[:, None]
    for place in range(num_seeds):
        np.add.at(weights, (draws, seeds[:, place, None], prompts[:, place]), 1.0)
    weights /= num_seeds * num_prompts
    weights.setflags(write=False)
    return weights


def resample(curve: Array) -> Array:
    """[seeds, evaluations, prompts] → mean curve of each draw, [draws, evaluations]."""
    seeds, _, prompts = curve.shape
    return np.asarray(np.einsum("dsp,sep->de", draw_weights(seeds, prompts), curve))


def mean_curve(curve: Array) -> Array:
    """[evaluations]."""
    return np.asarray(curve.mean(axis=(0, 2)))


def at(curve: Array, evaluation: int) -> Estimate:
    """pass@k at one evaluation."""
    return _estimate(mean_curve(curve)[evaluation], resample(curve)[:, evaluation])


def peak(curve: Array) -> int:
    """The evaluation at which the mean curve is highest, the later one of equals. It is chosen by looking, so its value
    flatters."""
    means = mean_curve(curve)
    return int(len(means) - 1 - np.argmax(means[::-1]))


def fall(curve: Array) -> Estimate:
    """From the highest evaluation to the last."""
    means, draws, top = mean_curve(curve), resample(curve), peak(curve)
    return _estimate(means[top] - means[-1], draws[:, top] - draws[:, -1])


def difference(ours: Array, theirs: Array) -> Estimate:
    """Ours minus theirs at the last evaluation, same seeds and prompts on both sides."""
    return _estimate(mean_curve(ours)[-1] - mean_curve(theirs)[-1], resample(ours)[:, -1] - resample(theirs)[:, -1])


def crossing(curve: Array, costs: Array, target: float) -> Estimate:
    """Cost at which the mean curve first reaches `target`, linear between evaluations; infinite when it never does.

    `costs` is [evaluations], the mean over seeds.
    """
    draws = np.array([first_crossing(row, costs, target) for row in resample(curve)])
    return _estimate(first_crossing(mean_curve(curve), costs, target), draws)


def crossing_ratio(ours: Array, our_costs: Array, theirs: Array, their_costs: Array, target: float) -> Estimate:
    """Their cost of the target over ours: above 1, ours is cheaper. NaN-free: never over never counts as 1."""
    pairs = zip(resample(ours), resample(theirs), strict=True)
    draws = [
        _ratio(first_crossing(theirs_drawn, their_costs, target), first_crossing(ours_drawn, our_costs, target))
        for ours_drawn, theirs_drawn in pairs
    ]
    value = _ratio(
        first_crossing(mean_curve(theirs), their_costs, target), first_crossing(mean_curve(ours), our_costs, target)
    )
    return _estimate(value, np.array(draws))


def first_crossing(values: Array | Sequence[float], costs: Array, target: float) -> float:
    """Where a line through the points first reaches `target`."""
    values = np.asarray(values, float)
    reached = np.flatnonzero(values >= target)
    if len(reached) == 0:
        return math.inf
    after = int(reached[0])
    if after == 0:
        return float(costs[0])
    share = (target - values[after - 1]) / (values[after] - values[after - 1])
    return float(costs[after - 1] + share * (costs[after] - costs[after - 1]))


def _ratio(theirs: float, ours: float) -> float:
    if math.isinf(ours):
        return 1.0 if math.isinf(theirs) else 0.0
    return theirs / ours if ours > 0 else math.inf


def _estimate(value: float, draws: Array) -> Estimate:
    tail = (1.0 - CONFIDENCE) / 2.0
    # inverted_cdf takes values that occur: no interpolation between a number and infinity.
    low, high = np.quantile(draws, [tail, 1.0 - tail], method="inverted_cdf")
    return Estimate(float(value), float(low), float(high))
