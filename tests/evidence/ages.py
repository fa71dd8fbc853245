"""How old the samples of an experiment were, which its lag only bounds, and what a version of age goes with.

An engine that is as fast as the learner samples from newer versions than the schedule allows it to. So two arms of one
condition may have been tried at different ages. Runs of one arm tell what that is worth: each arm of a condition has a
level of its own, and so has each seed, whose prompts are other ones.
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
    """Least squares of the end on the mean age, with a level for each arm of a condition and one for each seed."""

    value: float
    """Of pass@1 a version."""
    error: float
    """Half of the 95 % t interval."""
    runs: int


def ages_and_ends(arm: Arm) -> Array:
    """[runs, 3] seed, mean age in versions and pass@1 at the end, of the runs that took a step."""
    if not arm.results:
        return np.empty((0, 3))
    runs = zip(arm.seeds, arm.metric(AGE), arm.run_curve().end, strict=True)
    return np.array([(seed, np.mean(ages), end) for seed, ages, end in runs if ages]).reshape(-1, 3)


def slope_within(arms: Sequence[Arm]) -> Slope | None:
    """None where no arm has runs of different ages, or where they leave no degree of freedom."""
    cells = [runs for runs in map(ages_and_ends, arms) if len(runs) > 1]
    if not cells:
        return None
    seeds, ages, ends = np.concatenate(cells).T
    arm = np.repeat(np.arange(len(cells)), [len(runs) for runs in cells])
    levels = np.concatenate([_indicators(arm), _indicators(seeds)], axis=1)
    x, y = (values - levels @ np.linalg.lstsq(levels, values, rcond=None)[0] for values in (ages, ends))
    free = len(x) - int(np.linalg.matrix_rank(levels)) - 1
    if free < 1 or np.allclose(x, 0.0):
        return None
    value = float(x @ y / (x @ x))
    deviation = np.sqrt(((y - value * x) ** 2).sum() / free / (x @ x))
    return Slope(value=value, error=float(stats.t.ppf(0.975, free) * deviation), runs=len(x))


def _indicators(labels: Array) -> Array:
    """[rows, distinct labels] 1 where a row has the label."""
    return (labels[:, None] == np.unique(labels)).astype(float)


def told(arms: Sequence[Arm]) -> str:
    """A paragraph; empty where nothing was stale."""
    measured = [ages_and_ends(arm)[:, 1] for arm in arms]
    measured = [ages for ages in measured if len(ages)]
    if not measured or max(ages.max() for ages in measured) == 0.0:
        return ""
    means = [ages.mean() for ages in measured]
    text = (
        f"The lag is a bound: samples were {np.concatenate(measured).mean():.1f} versions old in the mean, "
        f"{min(means):.1f} to {max(means):.1f} in that of an arm in a column, so that two arms of one column are not "
        "equally stale. It depends on how busy the machine was with others, and on what an arm has to compute: scoring "
        "a batch again at the version that sampled it takes the learner longer."
    )
    if slope := slope_within(arms):
        text += (
            f" Between runs of one arm, prompts of a seed apart, a version more goes with {slope.value:+.3f} ± "
            f"{slope.error:.3f} of pass@1 at the end (95 % interval, {slope.runs} runs)."
        )
        if abs(slope.value) > slope.error:
            most = abs(slope.value) * (max(means) - min(means))
            text += f" Between the oldest and the youngest arm that would make {most:.2f}."
    return text
