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


def mean_ages(arm: Arm) -> list[float]:
    """Versions, run by run; nan of a run that took no step."""
    return [float(np.mean(run)) if run else float("nan") for run in arm.metric(AGE)]


def slope_within(arms: Sequence[Arm]) -> Slope | None:
    """None where no arm has runs of different ages, or where they leave no degree of freedom."""
    ages, ends, cells = [], [], 0
    for arm in arms:
        if not arm.results:
            continue
        age, end = np.array(mean_ages(arm)), arm.curve()[:, -1].mean(axis=1)
        known = np.isfinite(age)
        if known.sum() > 1:
            ages.append(age[known] - age[known].mean())
            ends.append(end[known] - end[known].mean())
            cells += 1
    if not cells:
        return None
    x, y = np.concatenate(ages), np.concatenate(ends)
    free = len(x) - cells - 1
    if free < 1 or not x.any():
        return None
    value = float(x @ y / (x @ x))
    deviation = np.sqrt(((y - value * x) ** 2).sum() / free / (x @ x))
    return Slope(value=value, error=float(stats.t.ppf(0.975, free) * deviation), runs=len(x))


def told(arms: Sequence[Arm]) -> str:
    """A paragraph; empty where nothing was stale."""
    ages = [age for arm in arms if arm.results for age in mean_ages(arm) if np.isfinite(age)]
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
