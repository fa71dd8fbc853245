"""A picture of fitted scaling curves: points, fit, 95 % band, C_mid, and dashed what lies beyond the data."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipeline.analysis.scaling.intervals import Region
from pipeline.analysis.scaling.sigmoid import Fit, Points
from pipeline.errors import RecipeError

# A machine without TeX-like fonts is told so for each of them, though nothing here is set in one.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

_NUM_PLACES = 120
_BEYOND = 4.0
"""The curve is drawn up to this many times the largest compute."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """One curve and all that is known of it."""

    name: str
    points: Points
    fit: Fit
    region: Region


def plot(fitted: Sequence[Fitted], path: Path, *, x: str, y: str, marks: Sequence[float] = ()) -> None:
    """Write `path`; `marks` are forecasts of the first curve. Raises RecipeError unless it ends in .png or .svg."""
    if path.suffix not in (".png", ".svg"):
        raise RecipeError(f"--plot {path} ends in {path.suffix or 'nothing'!r}, expected .png or .svg")
    if not path.parent.is_dir():
        raise RecipeError(f"--plot {path}: folder {path.parent} does not exist; make it first")
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for index, one in enumerate(fitted):
        _draw(axes, one, f"C{index}", max([_BEYOND * one.points.end, *marks]))
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


def _draw(axes: Axes, one: Fitted, color: str, end: float) -> None:
    points, fit = one.points, one.fit
    places = np.geomspace(points.compute[0], end, _NUM_PLACES)
    low, high = zip(*(one.region.score_at(place) for place in places), strict=True)
    axes.fill_between(places, low, high, color=color, alpha=0.15, linewidth=0)
    label = f"{one.name}: A {fit.asymptote:.3f}, B {fit.exponent:.2f}, C_mid {fit.midpoint:.4g}"
    until = np.append(places[places < points.end], points.end)
    beyond = np.append(points.end, places[places > points.end])
    axes.plot(until, fit.score_at(until), color=color, label=label)
    axes.plot(beyond, fit.score_at(beyond), color=color, linestyle="--")
    axes.plot(points.compute, points.score, ".", color=color, markersize=4)
    axes.axvline(fit.midpoint, color=color, linestyle=":", linewidth=1)
