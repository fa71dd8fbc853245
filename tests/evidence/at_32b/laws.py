"""How the gap depends on depth and width, and what that says about sizes that were not measured.

A law is log y = a + b log depth + c log hidden + noise, fitted by least squares; its prediction has a 95 % interval by
Student's t, with the parameters' covariance and the scatter of one more model. The interval knows nothing of what the
law itself may get wrong beyond the measured sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from tests.evidence.at_32b.results import Measured, Point

SATURATED_KL = 0.1
"""Nats over all tokens: beyond it half of the forks are decided otherwise, and no power law holds."""


@dataclass(frozen=True)
class Prediction:
    center: float
    low: float
    high: float


@dataclass(frozen=True)
class Law:
    """Exponents in depth and width, with standard errors."""

    coefficients: NDArray[np.float64]
    """a, b (depth) and c (width); c is 0 where only one width was measured."""
    covariance: NDArray[np.float64]
    scatter: float
    degrees: int

    @property
    def depth(self) -> tuple[float, float]:
        return float(self.coefficients[1]), math.sqrt(self.covariance[1, 1])

    @property
    def width(self) -> tuple[float, float]:
        return float(self.coefficients[2]), math.sqrt(self.covariance[2, 2])

    def predict(self, depth: float, hidden: float) -> Prediction:
        row = np.array([1.0, math.log(depth), math.log(hidden)])
        center = float(row @ self.coefficients)
        spread = math.sqrt(float(row @ self.covariance @ row) + self.scatter**2)
        half = float(stats.t.ppf(0.975, self.degrees)) * spread
        return Prediction(math.exp(center), math.exp(center - half), math.exp(center + half))


def fit(points: Sequence[Point], quantity: str) -> Law:
    """The law of `quantity` (error or kl) over `points`. Raises ValueError with too few of them."""
    rows: list[list[float]] = [[1.0, math.log(one.depth), math.log(one.hidden)] for one in points]
    design: Any = np.array(rows)
    values = np.log([getattr(one, quantity) for one in points])
    used = [0, 1, 2] if len({one.hidden for one in points}) > 1 else [0, 1]
    degrees = len(points) - len(used)
    if degrees < 1:
        raise ValueError(f"{len(points)} points cannot fix a law of {len(used)} parameters; measure more")
    found, *_ = np.linalg.lstsq(design[:, used], values, rcond=None)
    residuals = values - design[:, used] @ found
    scatter = math.sqrt(float(residuals @ residuals) / degrees)
    coefficients, covariance = np.zeros(3), np.zeros((3, 3))
    coefficients[used] = found
    covariance[np.ix_(used, used)] = scatter**2 * np.linalg.inv(design[:, used].T @ design[:, used])
    return Law(coefficients, covariance, scatter, degrees)


def narrow_law(measured: Measured, kind: str, map_: str, quantity: str) -> Law:
    """Over the depth and width studies of one kind of model, saturated points left out."""
    points = [*measured.of("depth", map_, kind), *measured.of("width", map_, kind)]
    return fit([one for one in points if one.kl < SATURATED_KL and one.depth >= 4], quantity)


def ratio(measured: Measured, study: str, map_: str, base: str, kind: str | None = None) -> float:
    """Squared error of a map over that of `base`, at the deepest point: the ratio of their KL while both are small."""
    last = measured.last(study, kind)
    return (last[map_].error / last[base].error) ** 2


def chi2_per_kl(measured: Measured) -> float:
    """Median of chi^2 / KL where both are small; 2 for log-ratios of a normal distribution."""
    small = [one.chi2 / one.kl for one in measured.points if 1e-5 < one.kl < 5e-3]
    return float(np.median(small))
