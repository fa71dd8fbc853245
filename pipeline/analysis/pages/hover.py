"""Values that a figure tells where the pointer rests: titles of points in its SVG, without a script."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape, unescape

import numpy as np
from matplotlib.axes import Axes

_MARK, _BETWEEN = "hover|", "|"
_MOST_POINTS = 150
"""Of a line that tell their values: a page stays small, and a finger's width has one."""


def add_values(
    axes: Axes, xs: Sequence[float], ys: Sequence[float], label: str, color: str, *, said: Sequence[float] | None = None
) -> None:
    """Points over a line that cannot be seen and say `label`, x and y, or what is `said` instead of y."""
    values = ys if said is None else said
    chosen = np.unique(np.linspace(0, len(xs) - 1, min(len(xs), _MOST_POINTS)).astype(int)).tolist()
    places = [f"{label.replace(_BETWEEN, ' ')}, {xs[i]:.6g}" for i in chosen]
    titles = [f"{place}: {values[i]:.5g}" for place, i in zip(places, chosen, strict=True)]
    _add(axes, [xs[i] for i in chosen], [ys[i] for i in chosen], titles, color)


def add_named_values(axes: Axes, xs: Sequence[float], ys: Sequence[float], names: Sequence[str], color: str) -> None:
    """The same where each point, such as the top of a bar, has a name of its own, which is said instead of x."""
    _add(axes, xs, ys, [f"{name}: {y:.5g}" for name, y in zip(names, ys, strict=True)], color)


def _add(axes: Axes, xs: Sequence[float], ys: Sequence[float], titles: Sequence[str], color: str) -> None:
    axes.plot(
        xs,
        ys,
        linestyle="",
        marker="o",
        markersize=9,
        markeredgewidth=0,
        color=color,
        alpha=0.0,
        gid=_MARK + _BETWEEN.join(titles),
        label="_nolegend_",
    )


def with_titles(svg: str) -> str:
    """The SVG that matplotlib wrote, with a <title> in each point of `add_values`."""
    return re.sub(rf'<g id="{re.escape(_MARK)}([^"]*)">(.*?</g>)\s*</g>', _titled, svg, flags=re.DOTALL)


def _titled(found: re.Match[str]) -> str:
    said = unescape(found[1]).split(_BETWEEN)
    points = re.findall(r"<use [^>]*/>", found[2])
    if len(points) != len(said):  # some lie outside the picture: it cannot be told which
        return ""
    titles = iter(said)
    body = re.sub(r"<use ([^>]*)/>", lambda use: f"<use {use[1]}><title>{escape(next(titles))}</title></use>", found[2])
    return f'<g class="values">{body}</g>'
