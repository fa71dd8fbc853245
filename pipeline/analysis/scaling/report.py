"""From sources to answers: one fit, a forecast, or a comparison, as plain values ready for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.analysis.scaling.curves import Curve, points_of, read_curve
from pipeline.analysis.scaling.intervals import MARGIN, Region, judge
from pipeline.analysis.scaling.plots import Fitted, plot
from pipeline.analysis.scaling.sigmoid import Grid, Points, common_asymptote, fit_curve, progress
from pipeline.errors import RecipeError, StoreError


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What the user says about R_0, the points and the grid; None: from the data."""

    r0: float | None = None
    skip: float = 0.0
    a_min: float | None = None
    a_max: float = 1.0
    c_mid_min: float | None = None
    c_mid_max: float | None = None

    def points(self, curves: Sequence[Curve]) -> Points:
        """Of repeats of one setting. Raises StoreError for too few, or a score that no A of the grid can reach."""
        points = points_of(curves, r0=self.r0, skip=self.skip)
        if points.score.max() > self.a_max:
            raise StoreError(
                f"{curves[0].name}: the score reaches {points.score.max():g}, above --a-max {self.a_max:g}; give an "
                "--a-max that the score cannot pass"
            )
        return points

    def grid(self, points: Points) -> Grid:
        return Grid.derived(
            points, a_min=self.a_min, a_max=self.a_max, c_mid_min=self.c_mid_min, c_mid_max=self.c_mid_max
        )


def fit_report(
    sources: Sequence[Path],
    x: str | None,
    y: str | None,
    bounds: Bounds,
    *,
    at: Sequence[float] = (),
    plot_path: Path | None = None,
) -> dict[str, Any]:
    """A joint fit of repeats, and with `at` forecasts. Keys A, B, C_mid, R_0, their intervals, identifiable, …"""
    if any(compute <= 0.0 for compute in at):
        raise RecipeError(f"--at {min(at):g} is no compute to forecast for, expected more than 0")
    curves = _read(sources, x, y)
    fitted, report = _fit(curves, bounds)
    if len(curves) > 1:
        report["A_by_run"] = [_fit([curve], bounds)[1]["A"] for curve in curves]
    if at:
        report["forecasts"] = [_forecast(fitted, compute) for compute in at]
    if plot_path is not None:
        plot([fitted], plot_path, x=curves[0].x, y=curves[0].y, marks=at)
    return report


def compare_report(
    sources: Sequence[Path],
    x: str | None,
    y: str | None,
    bounds: Bounds,
    *,
    common_a: float | None = None,
    plot_path: Path | None = None,
) -> dict[str, Any]:
    """A fit of each source, and another of each at a common A, in whose light B and C_mid can be compared."""
    if len(sources) < 2:
        raise RecipeError("compare needs at least two sources; for one use `evenkeel scaling fit`")
    curves = _read(sources, x, y)
    all_fitted, reports = zip(*(_fit([curve], bounds) for curve in curves), strict=True)
    all_points = [fitted.points for fitted in all_fitted]
    common = common_a if common_a is not None else _common(all_points, bounds)
    for curve, report in zip(curves, reports, strict=True):
        refit = _fit([curve], bounds, fixed=common)[1]
        kept = ("A", "B", "C_mid", "R_0", "B_interval", "C_mid_interval", "residual_std")
        report["at_common_A"] = {key: refit[key] for key in kept}
    if plot_path is not None:
        plot(all_fitted, plot_path, x=curves[0].x, y=curves[0].y)
    return dict(common_A=common, runs_fitted=list(reports), warnings=_remarks(reports))


def _read(sources: Sequence[Path], x: str | None, y: str | None) -> list[Curve]:
    curves = [read_curve(source, x, y) for source in sources]
    names = {(curve.x, curve.y) for curve in curves}
    if len(names) > 1:
        raise StoreError(f"sources measure different things ({sorted(names)}); choose one --x and --y for all")
    return curves


def _fit(curves: Sequence[Curve], bounds: Bounds, fixed: float | None = None) -> tuple[Fitted, dict[str, Any]]:
    points = bounds.points(curves)
    grid = bounds.grid(points) if fixed is None else _fixed(bounds, points, fixed)
    fit = fit_curve(points, grid)
    region = Region.around(fit, points, grid)
    verdict = judge(fit, region, points, grid)
    fitted = Fitted(name=curves[0].name, points=points, fit=fit, region=region)
    report = dict(
        A=fit.asymptote,
        B=fit.exponent,
        C_mid=fit.midpoint,
        A_interval=region.asymptote,
        B_interval=region.exponent,
        C_mid_interval=region.midpoint,
        identifiable=verdict.identifiable,
        R_0=fit.start,
        R_0_measured=points.start,
        residual_std=fit.residual_std,
        num_points=len(points.compute),
        C_range=(float(points.compute[0]), points.end),
        x=curves[0].x,
        y=curves[0].y,
        runs=[curve.name for curve in curves],
        warnings=[*verdict.warnings, *_late_start(fitted, curves, bounds)],
    )
    return fitted, report


def _fixed(bounds: Bounds, points: Points, asymptote: float) -> Grid:
    if asymptote <= points.start:
        raise RecipeError(f"a common A of {asymptote:g} is not above an R_0 of {points.start:g}; give --common-a above")
    return replace(bounds, a_min=asymptote, a_max=asymptote).grid(points)


def _late_start(fitted: Fitted, curves: Sequence[Curve], bounds: Bounds) -> list[str]:
    """R_0 taken from a point at which the curve has already risen makes A too high."""
    if bounds.r0 is not None:
        return []
    fit, first = fitted.fit, max(float(curve.compute.min()) for curve in curves)
    risen = float(progress(max(first, 1e-300), fit.exponent, fit.midpoint)[0]) * (fit.asymptote - fit.start)
    if first == 0.0 or risen < 0.5 * fit.residual_std:
        return []
    return [f"R_0 was taken at C = {first:g}, where the curve has risen by {risen:.3f} already; give --r0"]


def _forecast(fitted: Fitted, compute: float) -> dict[str, Any]:
    return dict(
        C=compute,
        R=float(fitted.fit.score_at(compute)),
        R_interval=fitted.region.score_at(compute),
        extrapolated=compute > fitted.points.end,
    )


def _common(all_points: Sequence[Points], bounds: Bounds) -> float:
    """The common A, from a grid that is above every curve's R_0."""
    least = max(float(bounds.grid(points).asymptotes[0]) for points in all_points)
    return common_asymptote([(points, replace(bounds, a_min=least).grid(points)) for points in all_points])


def _remarks(reports: Sequence[dict[str, Any]]) -> list[str]:
    """What to keep in mind when reading a comparison."""
    asymptotes = [report["A"] for report in reports]
    unknown = [", ".join(report["runs"]) for report in reports if not report["identifiable"]]
    if unknown:
        return [f"the common A rests partly on curves that cannot tell their own: {'; '.join(unknown)}"]
    if max(asymptotes) - min(asymptotes) <= MARGIN:
        return [f"the asymptotes differ by no more than repeats of one run do ({MARGIN}): compare B and C_mid"]
    return []
