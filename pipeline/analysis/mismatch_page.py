"""One HTML page of an attribution, with its figures inside: nothing to install, nothing to fetch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from pipeline.analysis.drawing import COLORS, page, render
from pipeline.data.files import write_atomically
from precision.mismatch.attribution import TERMS

TERM_COLORS = dict(
    staleness="violet", quantization="orange", routing="teal", kernels="blue", decoding="pink", total="ink"
)
MEANING = {
    "staleness": "weights moved since",
    "quantization": "FP8 formats",
    "routing": "other experts",
    "kernels": "engine computes otherwise",
    "decoding": "engine samples otherwise",
}
SMALLEST_SHARE = 1e-5
"""Of the largest total of a bucket; a term that stays below it has no line."""
NOTHING_NATS = 1e-9
"""What is drawn as 0: smaller numbers are rounding of float64."""
_SIZE = (5.5, 2.6)
"""Inches; two stand side by side."""


def write_page(result: Mapping[str, Any], folder: Path) -> Path:
    """Write mismatch.html into `folder` and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    # Routing is shown only where it was measured.
    shown = [term for term in TERMS if term != "routing" or result["measured"]["routing"]]
    rows = [(term, MEANING[term], result["terms"][term]) for term in shown]
    figures = [
        ("Where the gap comes from", _shares(result, shown)),
        ("Quantization, layer by layer", _layers(result)),
        ("By position", _by(result, shown, "by_position", "place of the token in the response")),
        ("By entropy (sure → unsure)", _by(result, shown, "by_entropy", "entropy of the learner's distribution, nats")),
    ]
    text = page(
        "mismatch.html.j2",
        dict(nats=_nats, percent=_percent),
        result=result,
        rows=[*rows, ("total", "all of it", result["total"])],
        figures=[(title, svg) for title, svg in figures if svg],
    )
    write_atomically(folder / "mismatch.html", text)
    return folder / "mismatch.html"


def _shares(result: Mapping[str, Any], shown: list[str]) -> str:
    shares = [100 * result["terms"][term]["share"] for term in shown]
    low, high = min(0.0, *shares), max(100.0, *shares)

    def draw(axes: Axes) -> None:
        axes.barh(range(len(shown)), shares, color=[COLORS[TERM_COLORS[term]] for term in shown], height=0.62)
        for row, (term, share) in enumerate(zip(shown, shares, strict=True)):
            text = _percent(share / 100) if result["measured"][term] else "not measured"
            axes.text(max(share, 0.0) + 0.015 * (high - low), row, text, va="center")
        axes.set_yticks(range(len(shown)), [f"{term}\n{MEANING[term]}" for term in shown])
        axes.invert_yaxis()
        axes.set_xlim(low * 1.15, high * 1.22)
        axes.set_xlabel("% of the squared gap; the bars add up to 100")
        axes.grid(axis="x")

    return render("shares of the squared gap", _SIZE, draw, left_in=1.6)


def _layers(result: Mapping[str, Any]) -> str | None:
    layers = result["layers"]

    def draw(axes: Axes) -> None:
        numbers, sizes = [one["layer"] for one in layers], [one["mean_abs"] for one in layers]
        axes.bar(numbers, sizes, color=COLORS["orange"], width=0.7)
        if len(layers) <= 12:
            for one in layers:
                axes.text(one["layer"], one["mean_abs"], f"{100 * one['share']:.0f} %", ha="center", va="bottom")
            axes.set_xticks(numbers)
        axes.set_ylim(top=1.15 * max(NOTHING_NATS, *sizes))
        axes.set_xlabel("decoder layer (%: its share of the term)")
        axes.set_ylabel("mean |nats| that the layer adds")

    return render("quantization by layer", _SIZE, draw, left_in=0.9) if layers else None


def _by(result: Mapping[str, Any], shown: list[str], split: str, label: str) -> str | None:
    """Draw the mean |term| in each bucket; None where there is no gap."""
    buckets = result[split]
    places = [at for at, count in enumerate(buckets["num_tokens"]) if count]
    if result["total"]["mean_abs"] <= NOTHING_NATS:
        return None

    def draw(axes: Axes) -> None:
        least = max(NOTHING_NATS, SMALLEST_SHARE * max(buckets["mean_abs"]["total"][at] for at in places))
        for term in [*shown, "total"]:
            values = np.array([buckets["mean_abs"][term][at] for at in places], float)
            if (values > least).any():
                style = "--" if term == "total" else "-"
                drawn = np.where(values > least, values, np.nan)
                color = COLORS[TERM_COLORS[term]]
                axes.plot(range(len(places)), drawn, style, marker="o", markersize=4, color=color, label=term)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}".replace("e-0", "e-")))
        axes.set_xticks(range(len(places)), [buckets["labels"][at] for at in places], fontsize=7.5)
        axes.set_xlabel(label)
        axes.set_ylabel("mean |nats|")
        axes.legend(loc="best", fontsize=8)

    return render(split, _SIZE, draw, left_in=0.8)


def _nats(value: float) -> str:
    """Return two digits, or 0."""
    return "0" if value == 0 else f"{value:.2g}"


def _percent(value: float) -> str:
    """Return one digit after the point."""
    return f"{round(100 * value, 1) + 0.0:.1f} %"  # never -0.0
