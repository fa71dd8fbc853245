"""The figures of docs/precision-at-32b.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.evidence.at_32b.anchor import Estimate
from tests.evidence.at_32b.results import Measured, Point
from tests.evidence.plots import PALETTE, STYLE

KIND_TITLES = {
    "plain-flat": "Gaussian, flat stream",
    "plain-growing": "Gaussian, growing stream",
    "outliers-flat": "outliers, flat stream",
    "outliers-growing": "outliers, growing stream",
}
COLORS = dict(zip(KIND_TITLES, PALETTE, strict=False))


def growth(measured: Measured, path: Path) -> None:
    """Error by depth, by width, and layer by layer in the true shapes."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.0, 3.4), layout="constrained", dpi=120)
        depth, width, shapes = figure.subplots(1, 3)
        for kind, title in KIND_TITLES.items():
            _lines(depth, measured.of("depth", "fp8_block", kind), "depth", COLORS[kind], "-", title)
            _lines(depth, measured.of("depth", "bf16", kind), "depth", COLORS[kind], ":", None)
            _lines(width, measured.of("width", "fp8_block", kind), "hidden", COLORS[kind], "-", None)
            _lines(width, measured.of("width", "bf16", kind), "hidden", COLORS[kind], ":", None)
        for name, color in (("fp8_block", COLORS["outliers-flat"]), ("bf16", PALETTE[5])):
            points = sorted(measured.of("shapes", name, "outliers-flat"), key=lambda one: one.depth)
            if not points:
                continue
            layers = np.array([one.depth for one in points])
            shapes.plot(layers, [one.error for one in points], "o", ms=3, color=color, label=name)
            ahead = np.arange(1, 65)
            last = points[-1]
            shapes.plot(ahead, last.error * (ahead / last.depth) ** 0.5, "--", lw=1, color=color)
        for axes, title, label in (
            (depth, "by depth, 256 channels", "layers"),
            (width, "by width, 8 layers", "hidden size"),
            (shapes, "Qwen3-32B's shapes, layer by layer", "layers passed (of 64)"),
        ):
            axes.set(xscale="log", yscale="log", title=title, xlabel=label)
            axes.set_xticks([], minor=True)
        depth.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
        width.set_xticks([128, 256, 512, 1024], ["128", "256", "512", "1024"])
        shapes.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
        depth.set_ylabel("relative error of the last hidden state")
        shapes.legend(title="measured; dashed: square root", fontsize=7, title_fontsize=7)
        figure.legend(*depth.get_legend_handles_labels(), loc="outside lower center", ncols=4)
        _save(figure, path)


def maps(ratios: dict[str, dict[str, float]], titles: dict[str, str], path: Path) -> None:
    """KL of each map as a share of that of blocks everywhere."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.5, 4.2), layout="constrained", dpi=120)
        axes = figure.subplots()
        names = list(titles)
        height = 0.8 / len(ratios)
        for place, (label, values) in enumerate(ratios.items()):
            at = [index + place * height for index, name in enumerate(names) if name in values]
            axes.barh(at, [values[name] for name in names if name in values], height, label=label, color=PALETTE[place])
        axes.set_yticks([index + 0.4 - height / 2 for index in range(len(names))], list(titles.values()))
        axes.invert_yaxis()
        axes.axvline(1.0, color="#444444", lw=0.8)
        axes.set_xlabel("squared error, blocks everywhere = 1 (the ratio of their KL)")
        figure.legend(loc="outside lower center", ncols=2, fontsize=7)
        _save(figure, path)


def lengths(measured: Measured, ess: dict[str, Estimate], titles: dict[str, str], ratio: float, path: Path) -> None:
    """KL by position, measured; ESS of sequences by length, extrapolated."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 3.6), layout="constrained", dpi=120)
        positions, sequences = figure.subplots(1, 2)
        for place, name in enumerate(("fp8_block", "block_kv", "bf16")):
            for point in measured.of("length", name):
                count = len(point.parts)
                at = (np.arange(count) + 0.5) * 4096 / count
                label = titles[name] if point.seed == 0 else None
                positions.plot(at, point.parts, color=PALETTE[place], label=label)
        positions.set(
            yscale="log", xlabel="position in the row", ylabel="KL, nats a token", title="measured, 8 layers of 256"
        )
        if measured.of("length", "fp8_block"):
            positions.legend(fontsize=7)
        tokens = np.logspace(1, 4.5, 60)
        for place, (name, estimate) in enumerate(ess.items()):
            low, center, high = (
                np.array([estimate.sequence_ess(ratio, int(n))[side] for n in tokens]) for side in range(3)
            )
            sequences.plot(tokens, center, color=PALETTE[place], label=titles[name])
            sequences.fill_between(tokens, low, high, color=PALETTE[place], alpha=0.15, lw=0)
        sequences.set(
            xscale="log", xlabel="tokens of a response", ylabel="ESS of whole sequences", title="32B, extrapolated"
        )
        sequences.legend(fontsize=7, loc="lower left")
        _save(figure, path)


def _lines(axes: Axes, points: Sequence[Point], by: str, color: str, style: str, label: str | None) -> None:
    """One faint dot a seed, and a line through the geometric means."""
    if not points:
        return
    at = sorted({getattr(one, by) for one in points})
    means = [np.exp(np.mean([np.log(one.error) for one in points if getattr(one, by) == x])) for x in at]
    axes.plot([getattr(one, by) for one in points], [one.error for one in points], ".", ms=3, color=color, alpha=0.5)
    axes.plot(at, means, style, color=color, label=label)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
