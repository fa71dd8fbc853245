"""ScaleRL's forecast: fit the first part of a run, ask what its end will be."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pipeline.analysis.scaling_fit import Grid, Points, Region, fit_curve
from pipeline.errors import StoreError
from tests.evidence.results import Arm
from tests.evidence.statistics import Array


@dataclass(frozen=True, kw_only=True)
class Told:
    """What the fit said about the last evaluation."""

    value: float
    points: int
    """Evaluations that were fitted, beside that of version 0, which is R_0."""
    asymptote: str
    """A with its interval, as text."""


def split(arm: Arm, share: float) -> int:
    """How many evaluations lie in the first `share` of the run."""
    return sum(version <= share * arm.versions[-1] for version in arm.versions)


def forecast_end(arm: Arm, share: float) -> Told:
    """Fit pass@1 (mean over seeds) against samples in the first `share` of the run and read the curve at its end, as
    `evenkeel scaling --at` does: R_0 is a point like the others, each a mean over
    the same runs."""
    scores, samples, known = arm.curve().mean(axis=(0, 2)), arm.costs("samples"), split(arm, share)
    try:
        points = Points.of(samples[1:known], scores[1:known], start=float(scores[0]), start_weight=1.0)
    except StoreError:
        return Told(value=math.nan, points=max(0, known - 1), asymptote="not fitted")
    grid = Grid.derived(points)
    fit = fit_curve(points, grid)
    region = Region.around(fit, points, grid)
    a_low, a_high = region.asymptote
    value = float(np.asarray(fit.score_at(samples[-1])))
    asymptote = f"{fit.asymptote:.3f} ({a_low:.3f} to {a_high:.3f})"
    return Told(value=value, points=known - 1, asymptote=asymptote)


def forecast_errors(arm: Arm, share: float) -> Array:
    """[runs] forecast less measurement, each run fitted by itself."""
    runs = [Arm(results=[result]) for result in arm.results]
    return np.array([forecast_end(run, share).value - run.curve()[0, -1].mean() for run in runs])
