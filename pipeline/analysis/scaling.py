"""Fit and compare the scaling curves of runs and JSONL files, as plain values ready for JSON, and plot them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pipeline.analysis.run_log import COMPUTE_AXES, RunLog, number, spent_by_version, steps_of
from pipeline.analysis.scaling_fit import (
    MARGIN,
    Fit,
    Floats,
    Grid,
    Points,
    Region,
    common_asymptote,
    fit_curve,
    judge,
    progress,
)
from pipeline.errors import RecipeError, StoreError


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Measured scores [n] over compute [n], sorted by compute, which is at least 0."""

    name: str
    x: str
    y: str
    compute: Floats
    score: Floats


def read_curve(source: Path, x: str | None, y: str | None) -> Curve:
    """Read a run directory or a JSONL file.

    A run: `x` is one of COMPUTE_AXES (default samples) and `y` a field of its `evaluated` events (default pass_at_1).
    JSONL: `x` and `y` name fields; lines that lack either are skipped, since a log mixes kinds of lines. Raises
    StoreError when the source cannot be read or holds no point, RecipeError when `x` or `y` must be chosen first.
    """
    if source.is_dir():
        x, y = x or "samples", y or "pass_at_1"
        if x not in COMPUTE_AXES:
            raise RecipeError(f"--x {x} is not known for a run, expected one of {', '.join(COMPUTE_AXES)}")
        run_log = RunLog.read(source)
        scores = {int(event["version"]): number(event, y) for event in run_log.evaluations}
        evaluated = [(version, score) for version, score in scores.items() if score is not None]
        if not evaluated:
            raise StoreError(f"{source} has no evaluation with a number {y!r} yet; train on, or choose another --y")
        spent = spent_by_version(steps_of(run_log), x)
        if missing := [version for version, _ in evaluated if version >= len(spent)]:
            raise StoreError(
                f"{source}: version {missing[0]} was evaluated, but the {x} of step {len(spent) - 1} are in no log; "
                "put back copies of the run's metrics, events and batches, or choose another --x"
            )
        points = [(spent[version], score) for version, score in evaluated]
    elif source.is_file():
        try:
            text = source.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StoreError(f"cannot read {source} ({error}); give a JSONL file, one JSON object a line") from error
        lines = list[dict[str, Any]]()
        for count, written in enumerate(text.splitlines(), 1):
            if not written.strip():
                continue
            try:
                value = json.loads(written)
            except ValueError as error:
                raise StoreError(f"{source}, line {count} is not JSON ({error}); correct or remove it") from error
            if not isinstance(value, dict):
                raise StoreError(f"{source}, line {count} is {type(value).__name__}, expected a JSON object")
            lines.append(value)
        fields = sorted({key for line in lines for key in line if number(line, key) is not None})
        listed = ", ".join(fields) or "none"
        if x is None or y is None:
            raise RecipeError(f"{source} is no run: name its fields with --x and --y; it has numbers in {listed}")
        for name in (x, y):
            if name not in fields:
                raise StoreError(f"{source} has no number in a field {name!r}, only in {listed}")
        read = [(number(line, x), number(line, y)) for line in lines]
        points = [(c, r) for c, r in read if c is not None and r is not None]
        if not points:
            raise StoreError(f"{source} has no line with both {x!r} and {y!r}; write them on the same line")
    else:
        raise StoreError(f"{source} does not exist; give the folder of a run or a JSONL file")
    known = np.array(sorted(points), np.float64)
    if known[0, 0] < 0.0:
        raise StoreError(f"{source}: {x} goes down to {known[0, 0]:g}, expected compute from 0 upwards")
    return Curve(name=source.name.removesuffix(".jsonl"), x=x, y=y, compute=known[:, 0], score=known[:, 1])


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The user's bounds on R_0, points and grid; those that are None come from the data."""

    r0: float | None = None
    skip: float = 0.0
    a_min: float | None = None
    a_max: float = 1.0
    c_mid_min: float | None = None
    c_mid_max: float | None = None

    def points(self, curves: Sequence[Curve]) -> Points:
        """Return the points to fit: those of all curves, which are repeats of one setting, at positive compute of at
        least `skip`. A given `r0` is exact. Otherwise the point of least compute of each curve (of a run: version 0)
        measures R_0 with noise: it is not fitted, and `skip` does not affect it. Raises StoreError for too few points,
        or a score above the grid of A."""
        compute = np.concatenate([curve.compute for curve in curves])
        score = np.concatenate([curve.score for curve in curves])
        keep = (compute > 0.0) & (compute >= self.skip)
        if self.r0 is None:
            first = np.concatenate([curve.compute == curve.compute.min() for curve in curves])
            keep &= ~first
            points = Points.of(compute[keep], score[keep], float(score[first].mean()), start_weight=int(first.sum()))
        else:
            points = Points.of(compute[keep], score[keep], self.r0, start_weight=math.inf)
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
    """Return a joint fit of repeats: A, B and C_mid with intervals, R_0, `identifiable`, forecasts `at` compute."""
    if any(compute <= 0.0 for compute in at):
        raise RecipeError(f"--at {min(at):g} is no compute to forecast for, expected more than 0")
    curves = _read(sources, x, y)
    fitted, report = _fit(curves, bounds)
    if len(curves) > 1:
        report["A_by_run"] = [_fit([curve], bounds)[1]["A"] for curve in curves]
    if at:
        report["forecasts"] = [
            dict(
                C=compute,
                R=float(fitted.fit.score_at(compute)),
                R_interval=fitted.region.score_at(compute),
                extrapolated=compute > fitted.points.end,
            )
            for compute in at
        ]
    if plot_path is not None:
        plot([fitted], plot_path, x=curves[0].x, y=curves[0].y, marks=at)
    return report


def compare_report(
    sources: Sequence[Path],
    x: str | None,
    y: str | None,
    bounds: Bounds,
    *,
    plot_path: Path | None = None,
) -> dict[str, Any]:
    """Return a fit of each source, and a second fit of each at a common A, where B and C_mid can be compared."""
    if len(sources) < 2:
        raise RecipeError("--compare needs at least two sources; leave it out for one")
    curves = _read(sources, x, y)
    all_fitted, reports = zip(*(_fit([curve], bounds) for curve in curves), strict=True)
    all_points = [fitted.points for fitted in all_fitted]
    # The grid starts above every curve's R_0.
    least = max(float(bounds.grid(points).asymptotes[0]) for points in all_points)
    common_a = common_asymptote([(points, replace(bounds, a_min=least).grid(points)) for points in all_points])
    for curve, report in zip(curves, reports, strict=True):
        refit = _fit([curve], bounds, fixed=common_a)[1]
        kept = ("A", "B", "C_mid", "R_0", "B_interval", "C_mid_interval", "residual_std")
        report["at_common_A"] = {key: refit[key] for key in kept}
    if plot_path is not None:
        plot(all_fitted, plot_path, x=curves[0].x, y=curves[0].y)
    asymptotes, warnings = [report["A"] for report in reports], list[str]()
    if unknown := [", ".join(report["runs"]) for report in reports if not report["identifiable"]]:
        warnings = [f"the common A rests partly on curves that cannot tell their own: {'; '.join(unknown)}"]
    elif max(asymptotes) - min(asymptotes) <= MARGIN:
        warnings = [f"the asymptotes differ by no more than repeats of one run do ({MARGIN}): compare B and C_mid"]
    return dict(common_A=common_a, runs_fitted=list(reports), warnings=warnings)


def _read(sources: Sequence[Path], x: str | None, y: str | None) -> list[Curve]:
    curves = [read_curve(source, x, y) for source in sources]
    names = {(curve.x, curve.y) for curve in curves}
    if len(names) > 1:
        raise StoreError(f"sources measure different things ({sorted(names)}); choose one --x and --y for all")
    return curves


def _fit(curves: Sequence[Curve], bounds: Bounds, fixed: float | None = None) -> tuple[Fitted, dict[str, Any]]:
    points = bounds.points(curves)
    grid = (bounds if fixed is None else replace(bounds, a_min=fixed, a_max=fixed)).grid(points)
    fit = fit_curve(points, grid)
    region = Region.around(fit, points, grid)
    identifiable, warnings = judge(fit, region, points, grid)
    fitted = Fitted(name=curves[0].name, points=points, fit=fit, region=region)
    first = max(float(curve.compute.min()) for curve in curves)
    risen = float(progress(max(first, 1e-300), fit.exponent, fit.midpoint)[0]) * (fit.asymptote - fit.start)
    if bounds.r0 is None and first > 0.0 and risen >= 0.5 * fit.residual_std:  # then A is too high
        warnings.append(f"R_0 was taken at C = {first:g}, where the curve has risen by {risen:.3f} already; give --r0")
    report = dict(
        A=fit.asymptote,
        B=fit.exponent,
        C_mid=fit.midpoint,
        A_interval=region.asymptote,
        B_interval=region.exponent,
        C_mid_interval=region.midpoint,
        identifiable=identifiable,
        R_0=fit.start,
        R_0_measured=points.start,
        residual_std=fit.residual_std,
        num_points=len(points.compute),
        C_range=(float(points.compute[0]), points.end),
        x=curves[0].x,
        y=curves[0].y,
        runs=[curve.name for curve in curves],
        warnings=warnings,
    )
    return fitted, report


_NUM_PLACES = 120
_BEYOND = 4.0
"""A curve is drawn up to this many times the largest compute."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    name: str
    points: Points
    fit: Fit
    region: Region


def plot(fitted: Sequence[Fitted], path: Path, *, x: str, y: str, marks: Sequence[float] = ()) -> None:
    """Write a plot; `marks` are forecasts of the first curve. Raises RecipeError unless `path` ends in .png or .svg."""
    if path.suffix not in (".png", ".svg"):
        raise RecipeError(f"--plot {path} ends in {path.suffix or 'nothing'!r}, expected .png or .svg")
    if not path.parent.is_dir():
        raise RecipeError(f"--plot {path}: folder {path.parent} does not exist; make it first")
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for index, one in enumerate(fitted):
        points, fit, color = one.points, one.fit, f"C{index}"
        places = np.geomspace(points.compute[0], max([_BEYOND * points.end, *marks]), _NUM_PLACES)
        lows, highs = zip(*(one.region.score_at(place) for place in places), strict=True)
        axes.fill_between(places, lows, highs, color=color, alpha=0.15, linewidth=0)
        label = f"{one.name}: A {fit.asymptote:.3f}, B {fit.exponent:.2f}, C_mid {fit.midpoint:.4g}"
        until = np.append(places[places < points.end], points.end)
        beyond = np.append(points.end, places[places > points.end])
        axes.plot(until, fit.score_at(until), color=color, label=label)
        axes.plot(beyond, fit.score_at(beyond), color=color, linestyle="--")
        axes.plot(points.compute, points.score, ".", color=color, markersize=4)
        axes.axvline(fit.midpoint, color=color, linestyle=":", linewidth=1)
    for mark in marks:
        low, high = fitted[0].region.score_at(mark)
        middle = float(fitted[0].fit.score_at(mark))
        axes.errorbar([mark], [middle], [[middle - low], [high - middle]], fmt="D", color="black", capsize=4, ms=4)
    axes.set_xscale("log")
    axes.set_xlabel(f"compute: {x}")
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=150)
