"""How the figures of a page are drawn: a RunLog in, inline SVG out.

Colors are drawn as placeholders and replaced by CSS variables, so that the page decides between light and dark.
Text stays text (searchable, in the page's font). A figure without data is None.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from pipeline.analysis.pages.hover import add_values, with_titles
from pipeline.analysis.run_log import RunLog

# A machine without TeX-like fonts is told so for each of them, though nothing here is set in one.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

Named = tuple[str, str | None]
"""Title and <svg> of a figure, None without data."""

Dashes = str | tuple[int, tuple[float, float]]
"""As matplotlib's linestyle."""

COLORS = {
    name: f"#fe00{index:02x}"
    for index, name in enumerate(
        ("ink", "muted", "grid", "surface", "blue", "orange", "green", "violet", "pink", "teal", "gray", "sand")
    )
}
"""Placeholder of each CSS variable `--NAME`."""

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 8.5,
    "axes.edgecolor": COLORS["grid"],
    "axes.facecolor": "none",
    "axes.labelcolor": COLORS["muted"],
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.formatter.useoffset": False,
    "figure.facecolor": "none",
    "grid.color": COLORS["grid"],
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.labelcolor": COLORS["muted"],
    "legend.handlelength": 1.2,
    "lines.linewidth": 1.7,
    "text.color": COLORS["ink"],
    "xtick.color": COLORS["grid"],
    "xtick.labelcolor": COLORS["muted"],
    "ytick.color": COLORS["grid"],
    "ytick.labelcolor": COLORS["muted"],
    "ytick.major.size": 0.0,
}

SMALL, WIDE = (3.7, 2.1), (11.4, 3.0)
"""Inches; in the page three small ones and their gaps are as wide as a wide one, so text has one size."""

LOG_FROM_RATIO = 20.0
"""A curve that may be logarithmic is, once its largest value is this many times its smallest."""

LOG_DECADES = 5
"""That a logarithmic axis shows at most."""

MOST_DRAWN = 1000
"""Points of a curve: more than a screen shows."""

SMOOTH_FROM_STEPS = 40
"""Runs at least this long get a running mean over 1/20 of the run in front of the raw values."""


def render(name: str, size: tuple[float, float], draw: Callable[[Axes], None]) -> str:
    """Draw one pair of axes and return it as an <svg> element whose colors are CSS variables."""
    with mpl.rc_context(STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = with_titles(svg)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)
    for color, placeholder in COLORS.items():
        svg = svg.replace(placeholder, f"var(--{color})")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(name)}" ', 1)


def curve(
    run_log: RunLog,
    name: str,
    lines: Sequence[tuple[str, str, str]],
    *,
    percent: bool = False,
    log: bool = False,
    floor: float | None = None,
    ceiling: float | None = None,
    smooth: bool = True,
) -> str | None:
    """Metrics over steps; each line is (metric, label, color). `floor` is the lowest end of the y axis; `ceiling` is
    what no value can exceed. Without `smooth`, what was set rather than measured is drawn as it was."""
    known = [(*run_log.series(metric), label, color) for metric, label, color in lines]
    known = [line for line in known if line[0]]
    if not known:
        return None

    def draw(axes: Axes) -> None:
        shown = np.concatenate([values for _, values, _, _ in known])
        lowest = _lowest_of_log(shown) if log else None
        overlaps = Overlaps(shown)
        for steps, values, label, color in known:
            draw_line(
                axes, steps, values, label, color, dashes=overlaps.dashes(steps, values), lowest=lowest, smooth=smooth
            )
        steps_axis(axes, ceiling=ceiling)
        mark_restarts(axes, run_log)
        if lowest is not None:
            axes.set_yscale("log")
        elif floor is not None:
            begin_at(axes, floor)
        if percent:
            axes.yaxis.set_major_formatter(FuncFormatter(percent_label))
        if len(known) > 1 or len(shown) == 1:
            axes.legend(loc="best", fontsize=8)

    return render(name, SMALL, draw)


def _lowest_of_log(shown: NDArray[np.float64]) -> float | None:
    """Where a logarithmic axis begins; None where a linear one shows all. What is lower, such as the gradient of a step
    without any advantage, is drawn there, and tells its value: it must not flatten the rest."""
    positive = shown[shown > 0]
    if not len(positive) or shown.min() < 0:
        return None
    lowest = max(float(positive.min()), 10.0**-LOG_DECADES * float(positive.max()))
    return lowest if positive.max() > LOG_FROM_RATIO * lowest else None


class Overlaps:
    """Curves that cover one drawn before are dashed: both can be seen."""

    def __init__(self, shown: NDArray[np.float64]) -> None:
        """`shown` [points] are the values of all curves of the figure."""
        self._near = 0.01 * float(shown.max() - shown.min())
        self._drawn: list[dict[float, float]] = []

    def dashes(self, xs: Sequence[float], ys: Sequence[float]) -> Dashes:
        """How the next curve is drawn: in dashes once half of its points lie on an earlier curve."""
        own = dict(zip(xs, ys, strict=True))
        covered = max((self._share(own, other) for other in self._drawn), default=0.0)
        self._drawn.append(own)
        return (0, (2.5, 2.5)) if covered >= 0.5 else "-"

    def _share(self, own: dict[float, float], other: dict[float, float]) -> float:
        return sum(x in other and abs(y - other[x]) <= self._near for x, y in own.items()) / len(own)


def draw_line(
    axes: Axes,
    steps: Sequence[float],
    values: Sequence[float],
    label: str,
    color: str,
    *,
    dashes: Dashes = "-",
    lowest: float | None = None,
    smooth: bool = True,
) -> None:
    """A line, or for a long run a faint line under its running mean; a single step is a dot, whose value the legend
    says. Points tell values. What is below `lowest` is drawn there."""
    drawn = values if lowest is None else [max(value, lowest) for value in values]
    add_values(axes, steps, drawn, label, COLORS[color], said=values)
    if len(steps) == 1:
        label = f"{label} {values[0]:.4g}"
    if len(steps) < SMOOTH_FROM_STEPS:
        marker = "o" if len(steps) == 1 else ""
        style: dict[str, Any] = dict(marker=marker, linestyle=dashes, clip_on=len(steps) > 1)
        axes.plot(steps, drawn, color=COLORS[color], label=label, **style)
        return
    shown = extremes(drawn)
    if not smooth:
        axes.plot(np.take(steps, shown), np.take(drawn, shown), color=COLORS[color], label=label, linestyle=dashes)
        return
    axes.plot(np.take(steps, shown), np.take(drawn, shown), color=COLORS[color], alpha=0.3, linewidth=0.8)
    mean = running_mean(drawn, len(drawn) // 20)
    axes.plot(np.take(steps, shown), mean[shown], color=COLORS[color], label=label, linestyle=dashes)


def extremes(values: Sequence[float]) -> NDArray[np.int64]:
    """Places of the points of a long curve that are drawn: of each of MOST_DRAWN / 2 parts the lowest and the highest,
    and the two ends."""
    if len(values) <= MOST_DRAWN:
        return np.arange(len(values))
    parts = np.array_split(np.asarray(values), MOST_DRAWN // 2)
    firsts = np.cumsum([0, *(len(part) for part in parts[:-1])])
    ends = [first + end(part) for first, part in zip(firsts, parts, strict=True) for end in (np.argmin, np.argmax)]
    return np.unique([0, *ends, len(values) - 1])


def running_mean(values: Sequence[float], window: int) -> NDArray[np.float64]:
    """Mean of the last `window` values, of fewer at the start."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return np.asarray((total[ends] - total[starts]) / (ends - starts))


def steps_axis(axes: Axes, label: str = "step", *, ceiling: float | None = None) -> None:
    """Whole numbers below; where there is one alone it is in the middle. The y axis is that of `plain_values`."""
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    if axes.dataLim.width < 1.0:
        only = round((axes.dataLim.x0 + axes.dataLim.x1) / 2)
        axes.set_xlim(only - 0.5, only + 0.5)
        axes.set_xticks([only], [str(only)])
    plain_values(axes, ceiling=ceiling)


def plain_values(axes: Axes, *, ceiling: float | None = None) -> None:
    """A linear y axis of at most six digits a label, and no exponent beside the axis, where legends are.

    A range that six digits cannot tell apart is widened: a curve that differs by rounding is drawn flat. Nothing is
    said above the `ceiling`.
    """
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: re.sub(r"e([+-])0", r"e\1", f"{value:.6g}")))
    low, high = axes.get_ylim()
    least = 2e-4 * max(abs(low), abs(high))
    if high - low < least:
        low, high = (low + high - least) / 2, (low + high + least) / 2
        axes.set_ylim(low, high)
    if ceiling is not None and high > ceiling:
        low = min(low - (high - ceiling), ceiling - least)
        ticks = [tick for tick in MaxNLocator(nbins=5).tick_values(low, ceiling) if low <= tick <= ceiling]
        axes.set_yticks(ticks)
        axes.set_ylim(low, ceiling + 0.04 * (ceiling - low))  # a line at the ceiling is as thick as elsewhere


def mark_restarts(axes: Axes, run_log: RunLog) -> None:
    """A dotted line at the first step that ended after each restart, or that went by another recipe."""
    if not run_log.of_kind("recipe_changed") and not run_log.of_kind("restarted"):
        return
    times = {int(line["step"]): float(line.get("time", 0.0)) for line in run_log.metrics}
    steps = {int(event["step"]) for event in run_log.of_kind("recipe_changed") if event.get("step") in times}
    for event in run_log.of_kind("restarted"):
        steps.update([step for step, time in times.items() if time > event["time"]][:1])
    for step in sorted(steps):
        axes.axvline(step, color=COLORS["muted"], linestyle=":", linewidth=0.9)


def begin_at(axes: Axes, floor: float) -> None:
    """The y axis begins there; a line at the floor is as thick as elsewhere."""
    high = axes.get_ylim()[1]
    axes.set_yticks([tick for tick in MaxNLocator(nbins=5).tick_values(floor, high) if floor <= tick <= high])
    axes.set_ylim(floor - 0.02 * (high - floor), high)


def legend_above(axes: Axes) -> None:
    """In one row over a wide figure."""
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=10, columnspacing=1.1, fontsize=8, borderaxespad=0.2)


def percent_label(share: float, _: object = None) -> str:
    """Of a tick: 12.5 %."""
    return f"{100 * share:.6g} %"
