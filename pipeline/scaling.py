"""The sigmoid law of RL compute, fitted as ScaleRL fits it (arXiv 2510.13786, equation 1 and appendix A.5).

    R_C = R_0 + (A - R_0) / (1 + (C_mid / C)^B)

Here A is `asymptote`, B `exponent`, C_mid `midpoint`, R_0 `start`, and 1 / (1 + (C_mid / C)^B) is the `progress`.
R_0 is measured, never fitted. C may be counted in anything that adds up: samples, tokens, accelerator-hours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipeline.errors import RecipeError, StoreError

Floats = NDArray[np.float64]

ASYMPTOTE_STEP = 0.005
"""Spacing of A in the grid, in units of the score (A.5)."""

NUM_MIDPOINTS = 100
"""Linearly spaced values of C_mid in the grid (A.5)."""

NUM_PARAMETERS = 3
"""A, B and C_mid."""

_EXPONENTS = np.geomspace(0.02, 50.0, 192)
"""Where B is looked for before SciPy refines it: A.5's rows lie between 1.09 and 2.44."""

_CELLS_REFINED = 64
"""Cells of the grid that SciPy decides between, of about 10,000."""

_CELLS_AT_ONCE = 4_000_000
"""Elements of the largest temporary array, 32 MB."""


@dataclass(frozen=True, kw_only=True)
class Points:
    """What was measured: `score` [n] at `compute` [n] > 0, sorted by compute; `start` is R_0."""

    compute: Floats
    score: Floats
    start: float

    @staticmethod
    def of(compute: ArrayLike, score: ArrayLike, start: float) -> Points:
        """Sort and check. Raises StoreError for fewer than four points or a compute that is not positive."""
        c, r = np.asarray(compute, np.float64), np.asarray(score, np.float64)
        if len(c) <= NUM_PARAMETERS:
            raise StoreError(
                f"{len(c)} points are left to fit, expected at least {NUM_PARAMETERS + 1} beside the one that gives "
                "R_0; evaluate more often, or lower --skip"
            )
        if not (np.isfinite(c).all() and np.isfinite(r).all() and c.min() > 0.0):
            raise StoreError(f"compute must be positive and all values finite, got compute from {c.min():g}")
        order = np.lexsort((r, c))
        return Points(compute=c[order], score=r[order], start=float(start))

    @property
    def end(self) -> float:
        """The largest compute."""
        return float(self.compute[-1])

    @property
    def rise(self) -> Floats:
        """[n] score - R_0."""
        return self.score - self.start


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Values of A [a] and C_mid [m] that are tried, both ascending."""

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
        """A in steps of .005 and 100 linearly spaced C_mid, over ranges that come from the data unless given.

        A runs from the first step above R_0 to `a_max`, and C_mid from 1/50 of the largest compute to twice it. A.5's
        own ranges, A .450 to .800 and C_mid 100 to 40,000 GPU-hours, suit runs of its size: give them as the four
        bounds to repeat it. `a_min` = `a_max` fixes A. Raises RecipeError for an empty range.
        """
        first = np.floor(points.start / ASYMPTOTE_STEP + 1e-6) + 1.0 if a_min is None else a_min / ASYMPTOTE_STEP
        count = int(np.floor(a_max / ASYMPTOTE_STEP - first + 1e-6)) + 1
        low = points.end / 50.0 if c_mid_min is None else c_mid_min
        high = points.end * 2.0 if c_mid_max is None else c_mid_max
        if not 1 <= count <= 10_000:
            raise RecipeError(
                f"A has no value between {first * ASYMPTOTE_STEP:g} and --a-max {a_max:g} in fewer than 10,000 steps "
                f"of {ASYMPTOTE_STEP}; R_0 is {points.start:g}, so give --a-min and --a-max above it"
            )
        if not 0.0 < low < high:
            raise RecipeError(f"C_mid cannot go from {low:g} to {high:g}; give 0 < --c-mid-min < --c-mid-max")
        # Multiples of a step, not sums of it, so that .610 is .610.
        asymptotes = np.round((first + np.arange(count)) * ASYMPTOTE_STEP, 12)
        return Grid(asymptotes=asymptotes, midpoints=np.linspace(low, high, NUM_MIDPOINTS))


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The cell of the grid with the least sum of squared residuals, `ssr`, with the best B there."""

    asymptote: float
    exponent: float
    midpoint: float
    start: float
    ssr: float
    num_points: int
    num_fitted: int
    """Parameters that were free: 2 when A was fixed."""

    @property
    def residual_std(self) -> float:
        """Of one point, in units of the score."""
        return float(np.sqrt(self.ssr / (self.num_points - self.num_fitted)))

    def score_at(self, compute: ArrayLike) -> Floats:
        """The curve, at compute of any shape."""
        return self.start + (self.asymptote - self.start) * progress(compute, self.exponent, self.midpoint)


def progress(compute: ArrayLike, exponent: ArrayLike, midpoint: ArrayLike) -> Floats:
    """1 / (1 + (C_mid / C)^B), the arguments broadcast together. Never exactly 0, so one may divide by it."""
    steepness = np.asarray(exponent) * (np.log(midpoint) - np.log(compute))
    return np.asarray(1.0 / (1.0 + np.exp(np.clip(steepness, -300.0, 300.0))), np.float64)


def moments(points: Points, exponents: Floats, midpoints: Floats) -> tuple[Floats, Floats]:
    """(sum f·rise, sum f²) over the points for each cell of `exponents` [k], `midpoints` [k]; f is the progress.

    They are all that A needs: the sum of squared residuals is sum rise² - 2 a·(sum f·rise) + a²·(sum f²), a = A - R_0.
    """
    crossed, squared = np.empty(len(exponents)), np.empty(len(exponents))
    size = max(1, _CELLS_AT_ONCE // len(points.compute))
    for begin in range(0, len(exponents), size):
        part = slice(begin, begin + size)
        f = progress(points.compute, exponents[part, None], midpoints[part, None])
        crossed[part], squared[part] = f @ points.rise, (f * f).sum(axis=1)
    return crossed, squared


def fit_curve(points: Points, grid: Grid) -> Fit:
    """The best cell of the grid: for each (A, C_mid) the B with the least sum of squared residuals (A.5).

    A.5 calls SciPy's curve_fit in every cell, from B = 1. Here B is first scanned for all cells at once, which finds
    the same minimum without a solver's start; SciPy then refines B in the best 64 cells, and the best of those wins.
    """
    scanned, exponents = _scan(points, grid)
    best = np.argsort(scanned, axis=None)[:_CELLS_REFINED]
    fits = []
    for a, m in zip(*np.unravel_index(best, scanned.shape), strict=True):
        asymptote, midpoint = float(grid.asymptotes[a]), float(grid.midpoints[m])
        exponent, ssr = _refine(points, asymptote, midpoint, float(exponents[a, m]))
        fits.append((ssr, asymptote, midpoint, exponent))
    ssr, asymptote, midpoint, exponent = min(fits)
    return Fit(
        asymptote=asymptote,
        exponent=exponent,
        midpoint=midpoint,
        start=points.start,
        ssr=ssr,
        num_points=len(points.compute),
        num_fitted=NUM_PARAMETERS - (len(grid.asymptotes) == 1),
    )


def common_asymptote(all_points: list[Points], grid: Grid) -> float:
    """The A of the grid that fits several curves best together, each with a B and C_mid of its own.

    Each curve counts by its squared residuals over the variance that its own best A leaves, so that a noisier or a
    longer run does not decide alone. `grid.midpoints` are multiples of each curve's largest compute.
    """
    total = np.zeros(len(grid.asymptotes))
    for points in all_points:
        own = Grid(asymptotes=grid.asymptotes, midpoints=grid.midpoints * points.end)
        ssr = np.maximum(_scan(points, own)[0].min(axis=1), 1e-12)
        total += ssr / ssr.min() * (len(points.compute) - NUM_PARAMETERS)
    return float(grid.asymptotes[int(np.argmin(total))])


def _scan(points: Points, grid: Grid) -> tuple[Floats, Floats]:
    """([a, m] least sum of squares over B, to second order between the scanned B; [a, m] that scanned B)."""
    num_m, num_b = len(grid.midpoints), len(_EXPONENTS)
    crossed, squared = moments(points, np.tile(_EXPONENTS, num_m), np.repeat(grid.midpoints, num_b))
    rise = grid.asymptotes - points.start
    least, exponents = np.empty((2, len(rise), num_m))
    rows = np.arange(num_m)
    for a, height in enumerate(rise):
        ssr = ((points.rise**2).sum() - 2 * height * crossed + height**2 * squared).reshape(num_m, num_b)
        at = ssr.argmin(axis=1).clip(1, num_b - 2)
        below, here, above = ssr[rows, at - 1], ssr[rows, at], ssr[rows, at + 1]
        curvature = np.maximum(below - 2 * here + above, 1e-300)
        # The least of the parabola through three neighbours; at the ends of the scan it would extrapolate.
        inside = (here <= below) & (here <= above)
        vertex = here - np.where(inside, (above - below) ** 2 / (8 * curvature), 0.0)
        least[a], exponents[a] = np.where(inside, vertex, np.minimum(below, above)), _EXPONENTS[at]
    return least, exponents


def _refine(points: Points, asymptote: float, midpoint: float, exponent: float) -> tuple[float, float]:
    """(B, sum of squares) at a fixed (A, C_mid): SciPy's Levenberg–Marquardt, which is what its curve_fit runs."""
    from scipy.optimize import least_squares

    height, log_ratio = asymptote - points.start, np.log(points.compute / midpoint)

    def residuals(log_b: Floats) -> Floats:
        return height * progress(points.compute, np.exp(log_b), midpoint) - points.rise

    def slope(log_b: Floats) -> Floats:
        f = progress(points.compute, np.exp(log_b), midpoint)
        return np.asarray(height * np.exp(log_b) * log_ratio * f * (1.0 - f))[:, None]

    # In log B, which cannot turn negative: a curve that falls is not a slow rise.
    solved = least_squares(residuals, [np.log(exponent)], slope, method="lm", xtol=1e-12, ftol=1e-12, gtol=1e-12)
    log_b = float(np.clip(solved.x[0], np.log(_EXPONENTS[0]), np.log(_EXPONENTS[-1])))
    return float(np.exp(log_b)), float((residuals(np.array([log_b])) ** 2).sum())
