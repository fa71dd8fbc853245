"""What the points leave open about a sigmoid: profile-likelihood intervals, forecasts, and whether A is known at all.

Given B and C_mid the best A has a closed form, A = R_0 + sum f·(y - R_0) / sum f^2 with f the progress (Moments: also
for an R_0 with noise), and the sum of squares around it is a parabola. So every curve that fits well enough is found on
a mesh over B and C_mid alone, each cell with the range of A that fits there; each interval is then the largest and
smallest value over those cells.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.analysis.scaling.sigmoid import Fit, Floats, Grid, Moments, Points, progress

CHI2_95 = 3.841458820694124
"""95 % quantile of chi-squared with one degree of freedom: the rise of the profile likelihood at an interval's end."""

_MESH = (72, 96)
"""Values of B and C_mid in each pass; both logarithmic."""

_NUM_PASSES = 6
"""Each pass but the first narrows the mesh to where the curves that fit were found."""

_REACH = 4.0
"""While narrowing, a curve is kept until its chi-squared rises by this many times CHI2_95 (twice as wide)."""

_WIDEST_B = (0.02, 50.0)
_WIDEST_C_MID = (1e-4, 1e4)
"""Outermost mesh; C_mid relative to the largest compute."""

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Region:
    """All curves whose squared residuals are within the threshold, a range of A for each cell (B, C_mid).

    The noise is taken as independent, alike at all points, and as large as the fit's residuals say. With fewer than
    about ten points the intervals are too narrow, as chi-squared stands for an F distribution.
    """

    exponents: Floats
    """[k]"""
    midpoints: Floats
    """[k]"""
    lowest: Floats
    """[k] least A that fits, within the grid's range of A."""
    highest: Floats
    """[k] largest A that fits."""
    lowest_start: Floats
    """[k] R_0 that goes with the least A; all alike when R_0 is exact."""
    highest_start: Floats
    """[k] R_0 that goes with the largest A."""

    @staticmethod
    def around(fit: Fit, points: Points, grid: Grid) -> Region:
        """The region of `fit`; never empty, as it holds the fit itself."""
        least = fit.ssr + 1e-14 * float((points.rise**2).sum())
        variance = fit.residual_std**2
        box = np.log(np.array([_WIDEST_B, [side * points.end for side in _WIDEST_C_MID]]))
        for _ in range(_NUM_PASSES - 1):
            region = _search(fit, points, grid, box, least + _REACH * CHI2_95 * variance)
            box = region._box(box)
        return _search(fit, points, grid, box, least + CHI2_95 * variance)

    @property
    def asymptote(self) -> Interval:
        return float(self.lowest.min()), float(self.highest.max())

    @property
    def exponent(self) -> Interval:
        return float(self.exponents.min()), float(self.exponents.max())

    @property
    def midpoint(self) -> Interval:
        return float(self.midpoints.min()), float(self.midpoints.max())

    def score_at(self, compute: float) -> Interval:
        """95 % interval of the curve itself at a positive `compute`: a new measurement adds its own noise."""
        f, rest = progress(compute, self.exponents, self.midpoints)
        low, high = self.lowest * f + self.lowest_start * rest, self.highest * f + self.highest_start * rest
        return float(min(low.min(), high.min())), float(max(low.max(), high.max()))

    def _box(self, outer: Floats) -> Floats:
        """[2, 2] the log ranges that hold the region, a step of the mesh wider on every side."""
        steps = (outer[:, 1] - outer[:, 0]) / (np.array(_MESH) - 1)
        logs = np.log([self.exponents, self.midpoints])
        return np.stack([logs.min(axis=1) - steps, logs.max(axis=1) + steps], axis=1)


def _search(fit: Fit, points: Points, grid: Grid, box: Floats, threshold: float) -> Region:
    """The cells of a mesh over `box` in which some A of the grid's range stays below the threshold."""
    b, c_mid = (np.exp(np.linspace(low, high, num)) for (low, high), num in zip(box, _MESH, strict=True))
    exponents = np.append(np.repeat(b, len(c_mid)), fit.exponent)
    midpoints = np.append(np.tile(c_mid, len(b)), fit.midpoint)
    sums = Moments.of(points, exponents, midpoints)
    bounds = grid.asymptotes[[0, -1]] - points.start
    free = sums.crossed / sums.squared
    inside = sums.ssr(np.clip(free, *bounds)) <= threshold
    inside[-1] = True
    # Around its free optimum, which may lie outside the bounds, the parabola is symmetric.
    half = np.sqrt(np.maximum(threshold - sums.ssr(free), 0.0) / sums.squared)
    low, high = np.clip(free - half, *bounds), np.clip(free + half, *bounds)
    low[-1] = min(low[-1], fit.asymptote - points.start)
    high[-1] = max(high[-1], fit.asymptote - points.start)
    return Region(
        exponents=exponents[inside],
        midpoints=midpoints[inside],
        lowest=points.start + low[inside],
        highest=points.start + high[inside],
        lowest_start=points.start + sums.drift(low)[inside],
        highest_start=points.start + sums.drift(high)[inside],
    )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether the points say what A is, and in words why not."""

    identifiable: bool
    warnings: tuple[str, ...]


MARGIN = 0.02
"""ScaleRL's margin on A from three repeats of one run."""


def judge(fit: Fit, region: Region, points: Points, grid: Grid) -> Verdict:
    """A is identifiable when its interval ends inside the grid and the points surely reach beyond C_mid.

    Below C_mid the curve is close to the power law R_0 + (A - R_0)·(C / C_mid)^B, from which A and C_mid cannot be
    told apart. "Surely": the upper end of C_mid's interval is at most the largest compute.
    """
    reasons, remarks = [], []
    low, high = region.asymptote
    least, most = float(grid.asymptotes[0]), float(grid.asymptotes[-1])
    reach = points.end / region.midpoint[1]
    if len(grid.asymptotes) > 1:
        if high >= most - 1e-9:
            reasons.append(f"every A from {low:.3f} up to the grid's end {most:g} fits")
        if low <= least + 1e-9:
            reasons.append(f"A may be as low as the grid's start {least:g} (R_0 is {fit.start:.3f})")
        if reach < 1.0:
            reasons.append(
                f"C_mid may be as large as {region.midpoint[1]:.4g} and the points end at {points.end:.4g}; "
                "train to at least twice C_mid"
            )
        if not reasons and high - low > 2 * MARGIN:
            remarks.append(
                f"A is known to {(high - low) / 2:.3f} only, where repeats of one run differ by {MARGIN}; "
                "evaluate more often or on more prompts, or train for longer"
            )
    if fit.midpoint in (grid.midpoints[0], grid.midpoints[-1]):
        remarks.append(f"C_mid is at the end of its grid, {fit.midpoint:.4g}; widen --c-mid-min and --c-mid-max")
    words = [f"A is not identifiable: {reason}" for reason in reasons]
    return Verdict(identifiable=not reasons, warnings=(*words, *remarks))
