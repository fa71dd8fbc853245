"""Fit the sigmoid law of RL compute as ScaleRL does (arXiv 2510.13786, equation 1 and appendix A.5).

    R_C = R_0 + (A - R_0) / (1 + (C_mid / C)^B)

Here A is `asymptote`, B `exponent`, C_mid `midpoint`, R_0 `start`, and 1 / (1 + (C_mid / C)^B) is the `progress`. R_0
is measured, not fitted: it is exact, as in the paper, or has noise as the points have (`Points.start_weight`). C is any
measure of compute that adds up: samples, tokens, accelerator-hours.

Intervals are profile-likelihood intervals. Given B and C_mid, the best A has a closed form, A = R_0 + sum f·(y - R_0) /
sum f^2 with f the progress (Moments: also for an R_0 with noise), and the sum of squares around it is a parabola. So a
mesh over B and C_mid alone finds every curve that fits well enough, with a range of A in each cell. An interval ends at
the largest and smallest value over these cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipeline.errors import RecipeError, StoreError

Floats = NDArray[np.float64]

ASYMPTOTE_STEP = 0.005
"""Spacing of A in the grid, in units of the score (A.5)."""
NUM_MIDPOINTS = 100
"""Number of linearly spaced values of C_mid in the grid (A.5)."""
MIN_POINTS = 4
"""Fewest points of a fit: one more than the parameters A, B and C_mid."""
MAX_ASYMPTOTES = 2_000
"""Most values of A in a grid. A score far from 0 to 1 should be scaled first, since the step is .005."""
_EXPONENTS = np.geomspace(0.02, 50.0, 128)
"""Values of B that are scanned before SciPy refines it; those of A.5 lie between 1.09 and 2.44."""
_CELLS_REFINED = 24
"""Cells of the grid, of about 10,000, in which SciPy refines B."""
_CELLS_AT_ONCE = 4_000_000
"""Most elements of a temporary array, 32 MB."""


@dataclass(kw_only=True, eq=False)
class Points:
    """Measurements: `score` [n] at `compute` [n] > 0, sorted by compute, and R_0."""

    compute: Floats
    score: Floats
    start: float
    """R_0 as measured."""
    start_weight: float
    """Number of points that `start` counts as. Infinite: R_0 is exactly `start`, as in ScaleRL. 1: it is one
    measurement with the noise of the others, and the curve may start beside it at the price of that residual."""
    end: float = field(init=False)
    """The largest compute."""
    rise: Floats = field(init=False)
    """[n] score - `start`."""

    def __post_init__(self) -> None:
        self.end, self.rise = float(self.compute[-1]), self.score - self.start

    @staticmethod
    def of(compute: ArrayLike, score: ArrayLike, start: float, start_weight: float = math.inf) -> Points:
        """Return sorted points. Raises StoreError for fewer than four, infinite values or compute below or at 0."""
        c, r = np.asarray(compute, np.float64), np.asarray(score, np.float64)
        if len(c) < MIN_POINTS:
            raise StoreError(
                f"{len(c)} points are left to fit, expected at least {MIN_POINTS} beside the one that gives R_0; "
                "evaluate more often, or lower --skip"
            )
        if not (np.isfinite(c).all() and np.isfinite(r).all() and c.min() > 0.0):
            raise StoreError(f"compute must be positive and all values finite, got compute from {c.min():g}")
        order = np.lexsort((r, c))
        return Points(compute=c[order], score=r[order], start=float(start), start_weight=start_weight)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Values of A [a] and C_mid [m] to try, both ascending."""

    asymptotes: Floats
    midpoints: Floats

    @staticmethod
    def derived(
        points: Points,
        *,
        a_min: float | None = None,
        a_max: float = 1.0,
        c_mid_min: float | None = None,
        c_mid_max: float | None = None,
    ) -> Grid:
        """Return A in steps of .005 and 100 linearly spaced C_mid; bounds that are None come from the data.

        By default A runs from the first step above R_0 to `a_max`, and C_mid from 1/50 of the largest compute to twice
        it. The ranges of A.5, A .450 to .800 and C_mid 100 to 40,000 GPU-hours, suit runs of its size: give them as the
        four bounds to repeat it. `a_min` = `a_max` fixes A. Raises RecipeError for an empty range.
        """
        first = np.floor(points.start / ASYMPTOTE_STEP + 1e-6) + 1.0 if a_min is None else a_min / ASYMPTOTE_STEP
        count = int(np.floor(a_max / ASYMPTOTE_STEP - first + 1e-6)) + 1
        low = points.end / 50.0 if c_mid_min is None else c_mid_min
        high = points.end * 2.0 if c_mid_max is None else c_mid_max
        if not 1 <= count <= MAX_ASYMPTOTES:
            raise RecipeError(
                f"the grid of A from {first * ASYMPTOTE_STEP:g} to {a_max:g} has {max(count, 0)} steps of "
                f"{ASYMPTOTE_STEP}, expected 1 to {MAX_ASYMPTOTES}; R_0 is {points.start:g}, give --a-min and --a-max "
                "above it"
            )
        if not 0.0 < low < high:
            raise RecipeError(f"C_mid cannot go from {low:g} to {high:g}; give 0 < --c-mid-min < --c-mid-max")
        # Multiples of a step, not sums of it, so that .610 is .610.
        asymptotes = np.round((first + np.arange(count)) * ASYMPTOTE_STEP, 12)
        return Grid(asymptotes=asymptotes, midpoints=np.linspace(low, high, NUM_MIDPOINTS))


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The cell of the grid with the least sum of squared residuals, `ssr`, and its best B."""

    asymptote: float
    exponent: float
    midpoint: float
    start: float
    """R_0: the given value where it is exact, otherwise the start of the curve, within the noise of the measurement."""
    ssr: float
    residual_std: float
    """Standard deviation of one point's residual, in units of the score."""

    def score_at(self, compute: ArrayLike) -> Floats:
        """Return the curve at positive compute of any shape."""
        f, rest = progress(compute, self.exponent, self.midpoint)
        return self.asymptote * f + self.start * rest


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Sums over the points for each of k pairs (B, C_mid), which make the rest of the problem linear.

    With f the progress, g = 1 - f, a = A - start and d = R_0 - start, the residuals are rise - a·f - d·g. The best d is
    `drift` (a·`drift_slope` + `drift_offset`), 0 when R_0 is exact, and then the sum of squares is the parabola
    `constant` - 2·a·`crossed` + a^2·`squared`. Hence the best A: start + crossed / squared.
    """

    constant: Floats
    crossed: Floats
    squared: Floats
    drift_offset: Floats
    drift_slope: Floats

    @staticmethod
    def of(points: Points, exponents: Floats, midpoints: Floats) -> Moments:
        """Return the moments of pairs `exponents` [k], `midpoints` [k]."""
        sums = np.empty((5, len(exponents)))
        size = max(1, _CELLS_AT_ONCE // len(points.compute))
        for begin in range(0, len(exponents), size):
            part = slice(begin, begin + size)
            f, g = progress(points.compute, exponents[part, None], midpoints[part, None])
            squares = (f * f).sum(axis=1), (f * g).sum(axis=1), (g * g).sum(axis=1)
            for row, sum_ in zip(sums, (f @ points.rise, g @ points.rise, *squares), strict=True):
                row[part] = sum_
        fr, gr, ff, fg, gg = sums
        pull = 1.0 / (gg + points.start_weight)
        return Moments(
            constant=(points.rise**2).sum() - pull * gr**2,
            crossed=fr - pull * gr * fg,
            squared=np.maximum(ff - pull * fg**2, 1e-12 * ff),
            drift_offset=pull * gr,
            drift_slope=-pull * fg,
        )

    def ssr(self, height: float | Floats) -> Floats:
        """Return [k] the least sum of squares at A = start + height."""
        return np.asarray(self.constant - 2.0 * height * self.crossed + height**2 * self.squared)

    def drift(self, height: float | Floats) -> Floats:
        """Return [k] the best R_0 - start at A = start + height."""
        return np.asarray(self.drift_offset + height * self.drift_slope)


def progress(compute: ArrayLike, exponent: ArrayLike, midpoint: ArrayLike) -> tuple[Floats, Floats]:
    """Return f = 1 / (1 + (C_mid / C)^B) and 1 - f, never exactly 0; the arguments are broadcast together."""
    ratio = np.exp(np.clip(np.asarray(exponent) * (np.log(midpoint) - np.log(compute)), -300.0, 300.0))
    f = 1.0 / (1.0 + ratio)
    return f, ratio * f


def fit_curve(points: Points, grid: Grid) -> Fit:
    """Return the best cell of the grid, with the B of least squared residuals for each (A, C_mid) (A.5).

    A.5 calls SciPy's curve_fit in every cell, from B = 1. Here B is first scanned for all cells at once, which finds
    the same minimum without a solver's start; SciPy then refines B in the best 24 cells, and the best of those wins.
    """
    scanned, exponents = _scan(points, grid)
    best = np.argsort(scanned, axis=None)[:_CELLS_REFINED]
    fits = []
    for a, m in zip(*np.unravel_index(best, scanned.shape), strict=True):
        asymptote, midpoint = float(grid.asymptotes[a]), float(grid.midpoints[m])
        exponent, ssr = _refine(points, asymptote, midpoint, float(exponents[a, m]))
        fits.append((ssr, asymptote, midpoint, exponent))
    ssr, asymptote, midpoint, exponent = min(fits)
    at_best = Moments.of(points, np.array([exponent]), np.array([midpoint]))
    # Points minus free parameters; an inexact R_0 adds one to each.
    freedom = len(points.compute) - (2 if len(grid.asymptotes) == 1 else 3)
    return Fit(
        asymptote=asymptote,
        exponent=exponent,
        midpoint=midpoint,
        start=points.start + float(at_best.drift(asymptote - points.start)[0]),
        ssr=ssr,
        residual_std=math.sqrt(ssr / freedom),
    )


def common_asymptote(curves: Sequence[tuple[Points, Grid]]) -> float:
    """Return the A that fits several curves best together, each with its B and C_mid; the grids share their A. A curve
    counts by its squared residuals over the variance that its best A leaves, so that no noisy or long run decides
    alone."""
    total = np.zeros(len(curves[0][1].asymptotes))
    for points, grid in curves:
        ssr = np.maximum(_scan(points, grid)[0].min(axis=1), 1e-12)
        total += ssr / ssr.min() * (len(points.compute) - MIN_POINTS + 1)
    return float(curves[0][1].asymptotes[int(np.argmin(total))])


def _scan(points: Points, grid: Grid) -> tuple[Floats, Floats]:
    """Return [a, m] the least sum of squares over B, interpolated between scanned B, and [a, m] the best scanned B."""
    num_m, num_b = len(grid.midpoints), len(_EXPONENTS)
    sums = Moments.of(points, np.tile(_EXPONENTS, num_m), np.repeat(grid.midpoints, num_b))
    least, exponents = np.empty((2, len(grid.asymptotes), num_m))
    rows = np.arange(num_m)
    for a, asymptote in enumerate(grid.asymptotes):
        ssr = sums.ssr(float(asymptote) - points.start).reshape(num_m, num_b)
        at = ssr.argmin(axis=1).clip(1, num_b - 2)
        below, here, above = ssr[rows, at - 1], ssr[rows, at], ssr[rows, at + 1]
        curvature = np.maximum(below - 2 * here + above, 1e-300)
        # The minimum of the parabola through three neighbors; at the ends of the scan it would extrapolate.
        inside = (here <= below) & (here <= above)
        vertex = here - np.where(inside, (above - below) ** 2 / (8 * curvature), 0.0)
        least[a], exponents[a] = np.where(inside, vertex, np.minimum(below, above)), _EXPONENTS[at]
    return least, exponents


def _refine(points: Points, asymptote: float, midpoint: float, exponent: float) -> tuple[float, float]:
    """Return the best B and its sum of squares at a fixed (A, C_mid), by SciPy's Levenberg–Marquardt."""
    from scipy.optimize import least_squares

    height, bounds = asymptote - points.start, np.log(_EXPONENTS[[0, -1]])

    def residuals(log_b: Floats) -> Floats:
        f, g = progress(points.compute, np.exp(np.clip(log_b, *bounds)), midpoint)
        if math.isinf(points.start_weight):
            return height * f - points.rise
        drift = (g @ points.rise - height * (f @ g)) / (g @ g + points.start_weight)
        return np.append(height * f + drift * g - points.rise, math.sqrt(points.start_weight) * drift)

    # In log B, which cannot turn negative: a curve that falls is not a slow rise.
    solved = least_squares(residuals, [math.log(exponent)], method="lm", xtol=1e-12, ftol=1e-12, gtol=1e-12)
    return float(np.exp(np.clip(solved.x[0], *bounds))), float(2.0 * solved.cost)


CHI2_95 = 3.841458820694124
"""95 % quantile of chi-squared with one degree of freedom: the rise of the profile likelihood at an interval's end."""
_MESH = (72, 96)
"""Number of values of B and of C_mid in each pass, both logarithmic."""
_NUM_PASSES = 6
"""Number of passes; each but the first narrows the mesh to the curves that fit."""
_REACH = 4.0
"""While the mesh narrows, a curve stays until its chi-squared rises by this many times CHI2_95 (twice as wide)."""
_WIDEST_B = (0.02, 50.0)
_WIDEST_C_MID = (1e-4, 1e4)
"""Limits of the first mesh; C_mid is relative to the largest compute."""

Interval = tuple[float, float]


@dataclass(kw_only=True, eq=False)
class Region:
    """All curves whose squared residuals are within the threshold, as a range of A for each of k cells (B, C_mid).

    The noise is assumed independent, alike at all points, and as large as the fit's residuals. With fewer than about
    ten points the intervals are too narrow, as chi-squared stands for an F distribution.
    """

    exponents: Floats
    midpoints: Floats
    lowest: Floats
    """[k] least A that fits, within the grid."""
    highest: Floats
    """[k] largest A that fits."""
    lowest_start: Floats
    """[k] R_0 at the least A; the same everywhere when R_0 is exact."""
    highest_start: Floats
    """[k] R_0 at the largest A."""
    asymptote: Interval = field(init=False)
    exponent: Interval = field(init=False)
    midpoint: Interval = field(init=False)

    def __post_init__(self) -> None:
        self.asymptote = float(self.lowest.min()), float(self.highest.max())
        self.exponent = float(self.exponents.min()), float(self.exponents.max())
        self.midpoint = float(self.midpoints.min()), float(self.midpoints.max())

    @staticmethod
    def around(fit: Fit, points: Points, grid: Grid) -> Region:
        """Return the region of `fit`; it is never empty, as it holds the fit itself."""
        least = fit.ssr + 1e-14 * float((points.rise**2).sum())
        variance = fit.residual_std**2
        box = np.log(np.array([_WIDEST_B, [side * points.end for side in _WIDEST_C_MID]]))
        for _ in range(_NUM_PASSES - 1):
            region = _search(fit, points, grid, box, least + _REACH * CHI2_95 * variance)
            # Search again in the log ranges that hold the region, a step of the mesh wider on every side.
            steps = (box[:, 1] - box[:, 0]) / (np.array(_MESH) - 1)
            logs = np.log([region.exponents, region.midpoints])
            box = np.stack([logs.min(axis=1) - steps, logs.max(axis=1) + steps], axis=1)
        return _search(fit, points, grid, box, least + CHI2_95 * variance)

    def score_at(self, compute: float) -> Interval:
        """Return the 95 % interval of the curve at a positive `compute`: a new measurement adds its noise."""
        f, rest = progress(compute, self.exponents, self.midpoints)
        low, high = self.lowest * f + self.lowest_start * rest, self.highest * f + self.highest_start * rest
        return float(min(low.min(), high.min())), float(max(low.max(), high.max()))


def _search(fit: Fit, points: Points, grid: Grid, box: Floats, threshold: float) -> Region:
    """Return the cells of a mesh over `box` in which some A of the grid's range stays below the threshold."""
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


MARGIN = 0.02
"""ScaleRL's margin on A, from three repeats of one run."""


def judge(fit: Fit, region: Region, points: Points, grid: Grid) -> tuple[bool, list[str]]:
    """Return whether the points identify A, and in words why not.

    A is identifiable when its interval ends inside the grid and the upper end of C_mid's interval is at most the
    largest compute. Below C_mid the curve is close to the power law R_0 + (A - R_0)·(C / C_mid)^B, from which A and
    C_mid cannot be told apart.
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
    return not reasons, [*(f"A is not identifiable: {reason}" for reason in reasons), *remarks]
