"""Draw the figures of a page: numbers in, inline SVG out.

Colors are placeholders that become CSS variables, so that the page chooses light or dark. Text stays text: searchable,
and in the page's font. Invisible points with SVG titles show values under the pointer without a script. A figure
without data is None.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from html import unescape
from typing import Any

import jinja2
import matplotlib as mpl
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

# Matplotlib warns of each missing TeX-like font, although no figure uses them.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

COLORS = {
    name: f"#fe00{index:02x}"
    for index, name in enumerate(
        ("ink", "muted", "grid", "surface", "blue", "orange", "green", "violet", "pink", "teal", "gray", "sand")
    )
}
"""Color → its placeholder in the drawing; the page has a CSS variable `--NAME` for each."""

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
"""Sizes in inches. Three small figures and their gaps are as wide as a wide one, so their text has the same size."""
LOG_FROM_RATIO = 20.0
"""A curve that may be logarithmic is so once its largest value exceeds this many times its smallest."""
LOG_DECADES = 5
MOST_DRAWN = 600
"""Most points drawn of a curve: more than a screen shows."""
SMOOTH_FROM = 40
"""Fewest points of a curve that is drawn as a running mean over 1/20 of them, in front of the raw values."""
_MOST_TOLD = 100
"""Most points of a line that show their values; the limit keeps pages small."""
_MARK, _BETWEEN = "hover|", "|"

Line = tuple[Sequence[float], Sequence[float], str, str]
"""Positions, values, label and color of a curve."""


def page(template: str, filters: dict[str, Callable[..., Any]], **values: Any) -> str:
    """Return an HTML page from a template in pipeline/analysis/pages, in the common layout. All texts are escaped; the
    filter `code` sets what stands in backticks as code."""
    loader = jinja2.PackageLoader("pipeline.analysis", "pages")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    code = partial(re.sub, "`([^`]*)`", r"<code>\1</code>")
    environment.filters.update(filters, code=lambda text: Markup(code(str(escape(text)))))
    return environment.get_template(template).render(style=loader.get_source(environment, "page.css")[0], **values)


@dataclass
class Picture:
    """One pair of axes. `svg` is empty until the picture is drawn."""

    axes: Axes
    svg: str = ""


@contextmanager
def picture(name: str, size: tuple[float, float], *, left_in: float = 0.62) -> Iterator[Picture]:
    """Yield a picture to draw into, then make it an <svg> element whose colors are CSS variables. `size` and `left_in`,
    the room for the labels of the y axis, are inches."""
    width, height = size
    with mpl.rc_context(STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=size)
        above = 0.32 if width > 6 else 0.1
        figure.subplots_adjust(left_in / width, 0.45 / height, 1 - 0.12 / width, 1 - above / height)
        drawn = Picture(figure.add_subplot())
        yield drawn
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))

    def titled(found: re.Match[str]) -> str:
        told = unescape(found[1]).split(_BETWEEN)
        points = re.findall(r"<use ([^>]*)/>", found[2])
        if len(points) != len(told):  # points outside the picture are missing, and it is unknown which
            return ""
        uses = (f"<use {at}><title>{escape(text)}</title></use>" for at, text in zip(points, told, strict=True))
        return f'<g class="values">{"".join(uses)}</g>'

    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(rf'<g id="{re.escape(_MARK)}([^"]*)">(.*?</g>)\s*</g>', titled, svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)
    for color, placeholder in COLORS.items():
        svg = svg.replace(placeholder, f"var(--{color})")
    drawn.svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(name)}" ', 1)


def curve(
    name: str,
    lines: Sequence[Line],
    *,
    percent: bool = False,
    log: bool = False,
    floor: float | None = None,
    smooth: bool = True,
    marks: Sequence[int] = (),
    xlabel: str = "step",
    size: tuple[float, float] = SMALL,
    legend: bool = True,
    more: Callable[[Axes], None] | None = None,
) -> str | None:
    """Draw curves of [n] points each. `floor` is the lower limit of the y axis, `marks` are positions of dotted lines,
    and `more` draws onto the same axes. Values that were set rather than measured are drawn without `smooth`.

    With `log`, the y axis is logarithmic where the values need it. A value below its lower end, such as the gradient
    norm of a step without any advantage, must not flatten the rest: it is drawn at that end and shows its true value.
    """
    known = [line for line in lines if len(line[0])]
    if not known:
        return None
    values = np.concatenate([np.asarray(ys, float) for _, ys, _, _ in known])
    lowest, positive = None, values[values > 0]
    if log and len(positive) and values.min() >= 0:
        begin = max(float(positive.min()), 10.0**-LOG_DECADES * float(positive.max()))
        lowest = begin if positive.max() > LOG_FROM_RATIO * begin else None
    with picture(name, size) as drawn:
        axes = drawn.axes
        for place, (xs, ys, label, color) in enumerate(known):
            heights = np.asarray(ys, float) if lowest is None else np.maximum(ys, lowest)
            add_values(axes, xs, heights, label, color, told=ys)
            # Each line is thinner than the one below it, so that equal lines can both be seen.
            style: dict[str, Any] = dict(color=COLORS[color], linewidth=1.7 + 1.2 * (len(known) - 1 - place))
            if len(xs) == 1:
                axes.plot(xs, heights, label=f"{label} {ys[0]:.4g}", marker="o", clip_on=False, **style)
                continue
            shown = extremes(heights)
            if len(xs) >= SMOOTH_FROM and smooth:
                axes.plot(np.take(xs, shown), heights[shown], color=COLORS[color], alpha=0.3, linewidth=0.8)
                heights = running_mean(heights, len(heights) // 20)
            axes.plot(np.take(xs, shown), heights[shown], label=label, **style)
        if more is not None:
            more(axes)
        steps_axis(axes, xlabel)
        for mark in marks:
            axes.axvline(mark, color=COLORS["muted"], linestyle=":", linewidth=0.9)
        if lowest is not None:
            axes.set_yscale("log")
        elif floor is not None:
            axes.set_ylim(bottom=floor)
        if percent:
            axes.yaxis.set_major_formatter(FuncFormatter(percent_label))
        if legend and (len(known) > 1 or len(values) == 1 or more is not None):
            axes.legend(loc="best", fontsize=8)
    return drawn.svg


def add_values(
    axes: Axes,
    xs: Sequence[float],
    ys: Sequence[float] | NDArray[np.float64],
    label: str | Sequence[str],
    color: str,
    *,
    told: Sequence[float] | None = None,
) -> None:
    """Draw invisible points over a line. Under the pointer each shows `label`, x and y, or its `told` instead of y;
    with several labels, each shows its label instead of x."""
    values = ys if told is None else told
    chosen = np.unique(np.linspace(0, len(xs) - 1, min(len(xs), _MOST_TOLD)).astype(int)).tolist()
    names = [f"{label}, {xs[i]:.6g}" if isinstance(label, str) else label[i] for i in chosen]
    titles = [f"{name.replace(_BETWEEN, ' ')}: {values[i]:.5g}" for name, i in zip(names, chosen, strict=True)]
    axes.plot(
        [xs[i] for i in chosen],
        [ys[i] for i in chosen],
        linestyle="",
        marker="o",
        markersize=9,
        markeredgewidth=0,
        color=COLORS[color],
        alpha=0.0,
        gid=_MARK + _BETWEEN.join(titles),
        label="_nolegend_",
    )


def extremes(values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the indices of both ends of a long curve and of the extremes in each of its MOST_DRAWN / 2 parts."""
    if len(values) <= MOST_DRAWN:
        return np.arange(len(values))
    parts = np.array_split(np.asarray(values), MOST_DRAWN // 2)
    firsts = np.cumsum([0, *(len(part) for part in parts[:-1])])
    ends = [first + end(part) for first, part in zip(firsts, parts, strict=True) for end in (np.argmin, np.argmax)]
    return np.unique([0, *ends, len(values) - 1])


def running_mean(values: Sequence[float] | NDArray[np.float64], window: int) -> NDArray[np.float64]:
    total = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return np.asarray((total[ends] - total[starts]) / (ends - starts))


def steps_axis(axes: Axes, label: str = "step") -> None:
    """Label the x axis with whole numbers, and the y axis with at most six digits. A single x is centered. A y range
    that six digits cannot resolve is widened, so that a curve that differs only by rounding is drawn flat."""
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    if axes.dataLim.width < 1.0:
        only = round((axes.dataLim.x0 + axes.dataLim.x1) / 2)
        axes.set_xlim(only - 0.5, only + 0.5)
        axes.set_xticks([only], [str(only)])
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: re.sub(r"e([+-])0", r"e\1", f"{value:.6g}")))
    low, high = axes.get_ylim()
    least = 2e-4 * max(abs(low), abs(high))
    if high - low < least:
        axes.set_ylim((low + high - least) / 2, (low + high + least) / 2)


def legend_above(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=10, columnspacing=1.1, fontsize=8, borderaxespad=0.2)


def percent_label(share: float, _: object = None) -> str:
    return f"{100 * share:.6g} %"


def range_label(bucket: str) -> str:
    """Return the label of a bucket of numbers: `1-3` as 1–3, and `3-` as ≥ 3."""
    low, dash, high = bucket.partition("-")
    return f"≥ {low}" if dash and not high else bucket.replace("-", "–")
