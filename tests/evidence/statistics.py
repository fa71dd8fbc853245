"""Inference with the run as the unit: t estimates with a pooled run-to-run variance, Holm's correction.

A cell is a condition and an arm; its runs differ by seed, by prompts and by chance. The variance s² of a quantity is
pooled within the cells c of one experiment, with n_c runs each:

    s² = Σ_c Σ_i (y_ci − ȳ_c)² / ν      ν = Σ_c (n_c − 1)

so that the difference of two means has the standard error s √(1/n_1 + 1/n_2) and, divided by it, Student's t
distribution with ν degrees of freedom (Snedecor and Cochran, Statistical Methods, 1989, sections 6.7 and 12.2). Runs of
one seed share their prompts; leaving that out makes the interval of a difference too wide, never too narrow, and that
of a mean too narrow: cells that share prompts tell less of the variance than ν says. A verdict asks for differences,
between arms or within runs; means are printed only.

Arrays carry any number of leading axes (simulated pages); the runs of a cell are the last axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.float64]

ALPHA = 0.05
"""The chance that a page has any false verdict at all."""


@dataclass(frozen=True)
class Estimate:
    """A value with its standard error and degrees of freedom; arrays of one shape, or numbers."""

    value: Array
    error: Array
    df: int

    def p_above(self, bound: float) -> Array:
        """One-sided p-value against "the truth is at most `bound`"; 1 where no spread was measured."""
        known = np.isfinite(self.error) & (self.error > 0.0)
        with np.errstate(invalid="ignore"):
            t = (self.value - bound) / np.where(known, self.error, 1.0)
        return np.where(known & (self.df > 0), stats.t.sf(t, max(self.df, 1)), 1.0)

    def p_below(self, bound: float) -> Array:
        """One-sided p-value against "the truth is at least `bound`"."""
        return Estimate(-self.value, self.error, self.df).p_above(-bound)

    def interval(self) -> tuple[float, float]:
        """Two-sided 95 % interval of a single estimate, not corrected for others; infinite where nothing is known."""
        if self.df < 1 or not np.isfinite(self.error):
            return -math.inf, math.inf
        half = float(stats.t.isf(ALPHA / 2.0, self.df) * self.error)
        return float(self.value) - half, float(self.value) + half


@dataclass(frozen=True)
class Spread:
    """The run-to-run standard deviation of a quantity, pooled within cells."""

    sd: Array
    """NaN where no cell has two runs."""
    df: int

    @staticmethod
    def of(cells: Iterable[Array]) -> Spread:
        """`cells`: each [..., runs]."""
        found = list(cells)
        df = sum(cell.shape[-1] - 1 for cell in found)
        squares = sum(((cell - cell.mean(axis=-1, keepdims=True)) ** 2).sum(axis=-1) for cell in found)
        return Spread(np.sqrt(squares / df) if df else np.full(np.shape(squares), np.nan), df)

    def mean(self, runs: Array) -> Estimate:
        """The mean of `runs`, [..., runs]."""
        return Estimate(runs.mean(axis=-1), self.sd / math.sqrt(runs.shape[-1]), self.df)

    def difference(self, ours: Array, theirs: Array) -> Estimate:
        """The mean of `ours` less that of `theirs`."""
        error = self.sd * math.sqrt(1.0 / ours.shape[-1] + 1.0 / theirs.shape[-1])
        return Estimate(ours.mean(axis=-1) - theirs.mean(axis=-1), error, self.df)


def holm(p: Array) -> Array:
    """Adjusted p-values over the last axis: the i-th smallest of m times m − i + 1, made monotone (Holm, "A simple
    sequentially rejective multiple test procedure", 1979). Rejecting at most ALPHA keeps the chance of any false
    rejection at or below ALPHA however the tests depend on each other."""
    order = np.argsort(p, axis=-1)
    count = p.shape[-1]
    scaled = np.take_along_axis(p, order, axis=-1) * (count - np.arange(count))
    adjusted = np.minimum(np.maximum.accumulate(scaled, axis=-1), 1.0)
    result = np.empty_like(adjusted)
    np.put_along_axis(result, order, adjusted, axis=-1)
    return result
