"""The sigmoid fit: hand-worked values, the paper's own procedure, the paper's rows, and its invariances."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.analysis.scaling_fit import (
    Fit,
    Floats,
    Grid,
    Moments,
    Points,
    Region,
    common_asymptote,
    fit_curve,
    judge,
    progress,
)
from pipeline.errors import StoreError
from tests.support.examples import examples

ROWS = {
    "ScaleRL": (2542, 1.92, 0.610),
    "32k": (11272, 1.89, 0.645),
    "batch 512": (2818, 1.77, 0.605),
    "batch 2048": (10909, 1.70, 0.645),
    "8 generations": (2542, 2.44, 0.585),
    "Scout": (4242, 1.65, 0.710),
    "math": (2896, 2.05, 0.595),
    "code": (1675, 1.09, 0.615),
}
"""C_mid, B, A of ScaleRL's tables (arXiv 2510.13786)."""


def sigmoid(compute: Floats, midpoint: float, exponent: float, asymptote: float, start: float) -> Floats:
    """Equation 1, written a second time."""
    return start + (asymptote - start) / (1.0 + (midpoint / compute) ** exponent)


def sampled(
    row: str, reach: float, num: int, seed: int, *, noise: float = 0.01, start: float = 0.35, weight: float = 1.0
) -> Points:
    """`num` evenly spaced evaluations up to `reach` × C_mid, and one of version 0; noise uniform within ±`noise`."""
    midpoint, exponent, asymptote = ROWS[row]
    draw = np.random.default_rng(seed).uniform(-noise, noise, num + 1)
    compute = np.linspace(0.0, reach * midpoint, num + 1)[1:]
    score = sigmoid(compute, midpoint, exponent, asymptote, start) + draw[1:]
    return Points.of(compute, score, start + (draw[0] if math.isfinite(weight) else 0.0), weight)


def answer(points: Points, grid: Grid | None = None) -> tuple[Fit, Region, bool, list[str]]:
    grid = grid or Grid.derived(points)
    fit = fit_curve(points, grid)
    region = Region.around(fit, points, grid)
    return fit, region, *judge(fit, region, points, grid)


def test_progress_by_hand() -> None:
    # B = 2: at C_mid/2 the ratio is (1/0.5)^2 = 4 → 1/5; at C_mid 1/2; at 3 C_mid it is 1/9 → 9/10.
    f, rest = progress(np.array([50.0, 100.0, 300.0]), 2.0, 100.0)
    np.testing.assert_allclose(f, [0.2, 0.5, 0.9])
    np.testing.assert_allclose(rest, [0.8, 0.5, 0.1])


def test_best_asymptote_by_hand() -> None:
    # f = .2, .5, .9 as above and R_0 = .1. Scores .3, .5, .8, so rises .2, .4, .7:
    # sum f·rise = .04 + .2 + .63 = .87; sum f² = .04 + .25 + .81 = 1.1; A = .1 + .87/1.1 = .8909…
    # sum rise² = .04 + .16 + .49 = .69, so the least sum of squares is .69 - .87²/1.1 = .0019090…
    points = Points.of([50.0, 100.0, 300.0, 300.0], [0.3, 0.5, 0.8, 0.8], 0.1)
    three = Points(compute=points.compute[:3], score=points.score[:3], start=0.1, start_weight=math.inf)
    sums = Moments.of(three, np.array([2.0]), np.array([100.0]))
    assert sums.crossed[0] == pytest.approx(0.87)
    assert sums.squared[0] == pytest.approx(1.1)
    assert sums.ssr(0.87 / 1.1)[0] == pytest.approx(0.69 - 0.87**2 / 1.1)
    assert sums.drift(0.5)[0] == 0.0


def test_a_measured_start_is_one_more_residual() -> None:
    # The same problem with R_0 one measurement of weight w: plain least squares over (a, d) with a row for it.
    points = Points.of([50.0, 100.0, 300.0, 700.0], [0.3, 0.5, 0.8, 0.85], 0.1, 2.0)
    f, g = progress(points.compute, 2.0, 100.0)
    rows = np.vstack([np.stack([f, g], axis=1), [0.0, math.sqrt(2.0)]])
    (a, d), residual, *_ = np.linalg.lstsq(rows, np.append(points.rise, 0.0), rcond=None)
    sums = Moments.of(points, np.array([2.0]), np.array([100.0]))
    assert sums.crossed[0] / sums.squared[0] == pytest.approx(a)
    assert sums.drift(a)[0] == pytest.approx(d)
    assert sums.ssr(a)[0] == pytest.approx(residual[0])


@pytest.mark.parametrize("seed", range(3))
def test_equals_the_plain_grid_of_curve_fits(seed: int) -> None:
    """A.5 word for word: for each (A, C_mid) SciPy's curve_fit for B with its default start, then the least SSR."""
    from scipy.optimize import curve_fit

    points = sampled("ScaleRL", 3.0, 40, seed, weight=math.inf)
    grid = Grid(asymptotes=np.arange(0.560, 0.661, 0.01), midpoints=np.linspace(1500.0, 3500.0, 11))
    cells = []
    for a in grid.asymptotes:
        for m in grid.midpoints:
            best, _ = curve_fit(
                lambda c, b, a=a, m=m: sigmoid(c, m, b, a, points.start), points.compute, points.score, p0=[1.0]
            )
            ssr = ((sigmoid(points.compute, m, best[0], a, points.start) - points.score) ** 2).sum()
            cells.append((ssr, a, m, best[0]))
    ssr, a, m, b = min(cells)
    fit = fit_curve(points, grid)
    assert (fit.asymptote, fit.midpoint) == (a, m)
    assert fit.exponent == pytest.approx(b, rel=1e-5)
    assert fit.ssr == pytest.approx(ssr, rel=1e-9)
    assert fit.residual_std == pytest.approx(math.sqrt(ssr / (40 - 3)))


@pytest.mark.parametrize("row", ROWS)
def test_rows_with_noise_are_recovered_from_twice_the_midpoint(row: str) -> None:
    """Noise within ±.01. The error of A at 2 × C_mid falls with the number of points;."""
    fit, region, identifiable, warnings = answer(sampled(row, 2.0, 1000 if row == "code" else 400, seed=1))
    assert fit.asymptote == pytest.approx(ROWS[row][2], abs=0.02)
    assert fit.midpoint == pytest.approx(ROWS[row][0], rel=0.15)
    assert fit.exponent == pytest.approx(ROWS[row][1], rel=0.15)
    assert identifiable
    assert warnings == []
    assert region.asymptote[0] <= fit.asymptote <= region.asymptote[1]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("reach", [0.5, 0.8])
def test_rows_that_end_below_the_midpoint_are_not_identifiable(row: str, reach: float) -> None:
    _, _, identifiable, warnings = answer(sampled(row, reach, 40, 0))
    assert not identifiable
    assert all(text.startswith("A is not identifiable: ") for text in warnings[:1])


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Of 40 curves 38 intervals should hold the true A (binomial: fewer than 33 has a chance of 1 in 1,000)."""
    held = 0
    for seed in range(40):
        _, region, *_ = answer(sampled("ScaleRL", 3.0, 30, seed))
        held += region.asymptote[0] <= 0.610 <= region.asymptote[1]
    assert held >= 33


def test_interval_ends_are_where_the_profile_has_risen_by_chi_squared() -> None:
    """At the ends of A's interval SciPy, free in (B, C_mid, R_0), finds a sum of squares 3.84 variances higher."""
    from scipy.optimize import least_squares

    points = sampled("ScaleRL", 3.0, 40, 1)
    fit, region, *_ = answer(points)

    def best_ssr(asymptote: float) -> float:
        def residuals(p: Floats) -> Floats:
            curve = sigmoid(points.compute, math.exp(p[0]), math.exp(p[1]), asymptote, p[2])
            return np.append(curve - points.score, p[2] - points.start)

        start = [math.log(fit.midpoint), math.log(fit.exponent), fit.start]
        return float(2 * least_squares(residuals, start, xtol=1e-12, ftol=1e-12).cost)

    for end in region.asymptote:
        assert (best_ssr(end) - fit.ssr) / fit.residual_std**2 == pytest.approx(3.8415, abs=0.12)


@settings(max_examples=examples(8))
@given(seed=st.integers(0, 1000), scale=st.floats(1e-6, 1e6))
def test_scaling_compute_scales_the_midpoint_alone(seed: int, scale: float) -> None:
    points = sampled("ScaleRL", 2.5, 24, seed)
    scaled = Points.of(points.compute * scale, points.score, points.start, 1.0)
    fit, other = fit_curve(points, Grid.derived(points)), fit_curve(scaled, Grid.derived(scaled))
    assert other.asymptote == fit.asymptote
    assert other.midpoint == pytest.approx(fit.midpoint * scale, rel=1e-9)
    assert other.exponent == pytest.approx(fit.exponent, rel=1e-5)


def test_common_asymptote_lies_between_and_follows_the_better_known() -> None:
    # Rows of A .595 from 20 points and of .645 from 320: the common A is nearer to the second.
    few = sampled("math", 3.0, 20, 0)
    many = sampled("32k", 3.0, 320, 0)
    grids = [Grid.derived(points, a_min=0.4) for points in (few, many)]
    own = [fit_curve(points, grid).asymptote for points, grid in zip((few, many), grids, strict=True)]
    common = common_asymptote(list(zip((few, many), grids, strict=True)))
    assert own[0] < common < own[1] + 1e-9
    assert own[1] - common < common - own[0]


def test_derived_grid() -> None:
    points = Points.of([10.0, 20.0, 50.0, 100.0], [0.3, 0.4, 0.5, 0.6], 0.3)
    grid = Grid.derived(points)
    assert (grid.asymptotes[0], grid.asymptotes[1], grid.asymptotes[-1]) == (0.305, 0.31, 1.0)
    assert (len(grid.midpoints), grid.midpoints[0], grid.midpoints[-1]) == (100, 2.0, 200.0)
    paper = Grid.derived(points, a_min=0.45, a_max=0.8, c_mid_min=100.0, c_mid_max=40_000.0)
    assert (len(paper.asymptotes), paper.asymptotes[0], paper.asymptotes[-1]) == (71, 0.45, 0.8)
    assert (paper.midpoints[0], paper.midpoints[-1]) == (100.0, 40_000.0)


@pytest.mark.parametrize(
    ("compute", "message"), [([1.0, 2.0, 3.0], "3 points are left"), ([0.0, 1.0, 2.0, 3.0], "must be positive")]
)
def test_unusable_points_are_refused(compute: list[float], message: str) -> None:
    with pytest.raises(StoreError, match=message):
        Points.of(compute, [0.1] * len(compute), 0.1)
