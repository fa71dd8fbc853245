"""PNGs: for each condition a row of small axes, held-out pass@k, then each metric by step.

Each run is faint, their mean in front of it: two runs are no band."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tests.evidence.forecast import split
from tests.evidence.matrix import Experiment, Forecast
from tests.evidence.results import Arm, Result

# A machine without TeX-like fonts is told so for each of them, though nothing here is set in one.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

PALETTE = ("#1f5fa8", "#d9711c", "#2c8a4b", "#8b4fb0", "#b3304f", "#5b6770", "#a08a1d", "#1796a5")
STYLE: dict[Any, Any] = {
    "font.size": 8.0,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
}
LOG_FROM_RATIO = 50.0
"""A positive metric is drawn logarithmically once its largest value is this many times its smallest."""


def draw(experiment: Experiment, results: Sequence[Result], path: Path) -> None:
    """One row a condition; the same colors for the same arms throughout."""
    columns = [f"held-out pass@{k}" for k in experiment.pass_at] + list(experiment.series)
    rows = len(experiment.conditions)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(2.9 * len(columns), 2.5 * rows + 0.5), layout="constrained", dpi=110)
        grid = figure.subplots(rows, len(columns), squeeze=False)
        for row, (condition, variant) in enumerate(experiment.conditions.items()):
            arms = {name: Arm.of(results, condition, name) for name in experiment.arms}
            arms = {name: arm for name, arm in arms.items() if arm.results}
            for column, title in enumerate(columns):
                axes = grid[row][column]
                if column < len(experiment.pass_at):
                    _held_out(axes, experiment, arms, experiment.pass_at[column])
                else:
                    _metric(axes, experiment, arms, title)
                axes.set_title(title, fontsize=8)
                axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
            grid[row][0].set_ylabel(variant.title)
        lines = dict(pair for row in grid for pair in zip(*row[0].get_legend_handles_labels()[::-1], strict=True))
        figure.legend(list(lines.values()), list(lines), loc="outside lower center", ncols=4)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Software": None})


def draw_shares(arms: Mapping[str, Sequence[float | None]], cells: Sequence[str], bar: float, path: Path) -> None:
    """A table in colors: each arm's share of the best arm of its cell, cells as columns; blue reaches the bar. What was
    not run stays white."""
    shares = np.array([[np.nan if share is None else share for share in row] for row in arms.values()])
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        size = (2.2 + 0.85 * len(cells), 1.3 + 0.24 * len(arms))
        axes = (figure := Figure(figsize=size, layout="constrained", dpi=110)).subplots()
        axes.imshow(shares, cmap="RdYlBu", vmin=2 * bar - 1, vmax=1.0, aspect="auto")
        for row, column in zip(*np.nonzero(np.isfinite(shares)), strict=True):
            share = shares[row, column]
            color = "white" if share < 2 * bar - 0.95 or share > 0.97 else "black"
            axes.text(column, row, f"{share:.2f}", ha="center", va="center", fontsize=7, color=color)
        axes.set_xticks(range(len(cells)), [textwrap.fill(cell, 12) for cell in cells])
        axes.xaxis.tick_top()
        axes.set_yticks(range(len(arms)), list(arms))
        axes.tick_params(length=0)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Software": None})


def _held_out(axes: Axes, experiment: Experiment, arms: Mapping[str, Arm], k: int) -> None:
    """Each run faint, their mean in front of them."""
    for name, arm in arms.items():
        curve, color = arm.curve(k), _colour(experiment, name)
        for run in curve.mean(axis=2):
            axes.plot(arm.versions, run, color=color, alpha=0.3, linewidth=0.7)
        axes.plot(
            arm.versions,
            curve.mean(axis=(0, 2)),
            color=color,
            marker="o",
            markersize=2.5,
            label=_title(experiment, name),
        )
    axes.set_ylim(0.0, 1.0)
    if experiment.target is not None and k == 1:
        axes.axhline(experiment.target, color="#888888", linewidth=0.8, linestyle=":")
    for claim in experiment.claims:
        if isinstance(claim.judge, Forecast) and k == 1 and claim.judge.arm in arms:
            arm = arms[claim.judge.arm]
            axes.axvline(arm.versions[split(arm, claim.judge.share) - 1], color="#888888", linewidth=0.8, linestyle=":")


def _metric(axes: Axes, experiment: Experiment, arms: Mapping[str, Arm], metric: str) -> None:
    """Each seed faint, their mean in front of them."""
    shown: list[float] = []
    for name, arm in arms.items():
        seeds, color = [values for values in arm.metric(metric) if values], _colour(experiment, name)
        if not seeds:
            continue
        for values in seeds:
            axes.plot(values, color=color, alpha=0.25, linewidth=0.7)
            shown += values
        length = min(map(len, seeds))
        axes.plot(np.mean([values[:length] for values in seeds], axis=0), color=color)
    if shown and min(shown) > 0 and max(shown) > LOG_FROM_RATIO * min(shown):
        axes.set_yscale("log")


def _colour(experiment: Experiment, arm: str) -> str:
    return PALETTE[list(experiment.arms).index(arm) % len(PALETTE)]


def _title(experiment: Experiment, arm: str) -> str:
    return experiment.arms[arm].title
