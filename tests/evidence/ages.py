"""How old the samples of an experiment were, which its lag only bounds, and what a version of age goes with.

An engine that is as fast as the learner samples from newer versions than the schedule allows it to. So two arms of one
condition may have been tried at different ages. Runs that differ in nothing but their seed tell what that is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from tests.evidence.results import Arm
from tests.evidence.statistics import Array

AGE = "lag_mean"
"""The metric: versions, mean over the tokens of a step."""


@dataclass(frozen=True)
class Slope:
    """Least squares of the end on the mean age, within arms: each arm of a condition has a level of its own."""

    value: float
    """Of pass@1 a version."""
    error: float
    """Half of the 95 % t interval."""
    runs: int


def ages_and_ends(arm: Arm) -> Array:
    """[runs, 2] mean age in versions and pass@1 at the end, of the runs that took a step."""
    if not arm.results:
        return np.empty((0, 2))
    runs = zip(arm.metric(AGE), arm.run_curve().end, strict=True)
    return np.array([(np.mean(ages), end) for ages, end in runs if ages]).reshape(-1, 2)


def slope_within(arms: Sequence[Arm]) -> Slope | None:
    """None where no arm has runs of different ages, or where they leave no degree of freedom."""
    cells = [runs - runs.mean(axis=0) for runs in map(ages_and_ends, arms) if len(runs) > 1]
    if not cells:
        return None
    x, y = np.concatenate(cells).T
    free = len(x) - len(cells) - 1
    if free < 1 or not x.any():
        return None
    value = float(x @ y / (x @ x))
    deviation = np.sqrt(((y - value * x) ** 2).sum() / free / (x @ x))
    return Slope(value=value, error=float(stats.t.ppf(0.975, free) * deviation), runs=len(x))


def told(arms: Sequence[Arm]) -> str:
    """A paragraph; empty where nothing was stale."""
    ages = [age for arm in arms for age in ages_and_ends(arm)[:, 0]]
    if not ages or max(ages) == 0.0:
        return ""
    text = (
        f"The lag is a bound: samples were {min(ages):.1f} to {max(ages):.1f} versions old in the mean of a run, "
        "according to how busy the machine was with others, so that two arms of one column are not equally stale."
    )
    if slope := slope_within(arms):
        text += (
            f" Between runs that differ in nothing but the seed, a version more goes with {slope.value:+.3f} ± "
            f"{slope.error:.3f} of pass@1 at the end (95 % interval, {slope.runs} runs)."
        )
    return text
