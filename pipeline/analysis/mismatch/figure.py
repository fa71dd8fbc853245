"""The picture of an attribution: one figure of six panels, which a reader understands without a manual."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from precision.formats.rollout_format import RolloutFormat
from precision.mismatch.attribution import TERMS

# A machine without TeX-like fonts is told so for each of them, though nothing here is set in one.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

COLORS = {
    "staleness": "#7b5ea7",
    "quantization": "#e07b39",
    "routing": "#3a9e9e",
    "kernels": "#3b6fb6",
    "decoding": "#c2477f",
    "total": "#333333",
}
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

STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#bbbbbb",
    "axes.labelcolor": "#444444",
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "xtick.color": "#bbbbbb",
    "ytick.color": "#bbbbbb",
    "xtick.labelcolor": "#333333",
    "ytick.labelcolor": "#333333",
}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write the picture as PNG or SVG, by the ending of `path`."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(13, 8.2), layout="constrained")
        panels: tuple[Callable[[Axes, Mapping[str, Any]], None], ...] = (
            _shares,
            _sizes,
            _layers,
            _quantiles,
            _positions,
            _entropies,
        )
        grid = figure.subplots(2, 3)
        for axes, panel in zip(grid.flat, panels, strict=True):
            panel(axes, result)
        total = result["total"]
        figure.suptitle(
            f"{result['source']}: the gap log π(learner) − log π(engine) over {result['num_tokens']:,} sampled tokens "
            f"is {total['mean_abs']:.2g} nats in the mean; ESS {total['ess']:.4f}",
            x=0.01,
            ha="left",
            fontsize=12.5,
        )
        figure.savefig(path, dpi=110)


def shown_terms(result: Mapping[str, Any]) -> list[str]:
    """Routing only where it was measured."""
    return [term for term in TERMS if term != "routing" or result["measured"]["routing"]]


def _shares(axes: Axes, result: Mapping[str, Any]) -> None:
    terms = shown_terms(result)
    shares = [100 * result["terms"][term]["share"] for term in terms]
    axes.barh(range(len(terms)), shares, color=[COLORS[term] for term in terms], height=0.62)
    low, high = min(0.0, *shares), max(100.0, *shares)
    for row, (term, share) in enumerate(zip(terms, shares, strict=True)):
        text = "not measured" if not result["measured"][term] else f"{share + 0.0:.1f} %".replace("-0.0", "0.0")
        axes.text(max(share, 0.0) + 0.015 * (high - low), row, text, va="center")
    axes.set_yticks(range(len(terms)), [f"{term}\n{MEANING[term]}" for term in terms])
    axes.invert_yaxis()
    axes.set_xlim(low * 1.15, high * 1.22)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    axes.set_xlabel("% of the squared gap; the bars add up to 100")
    axes.set_title("Where the gap comes from")
    axes.grid(axis="x")
    axes.tick_params(length=0)


def _sizes(axes: Axes, result: Mapping[str, Any]) -> None:
    terms = [*shown_terms(result), "total"]
    statistics = [result["total"] if term == "total" else result["terms"][term] for term in terms]
    for row, (term, one) in enumerate(zip(terms, statistics, strict=True)):
        axes.barh(row, one["mean_positive"], color=COLORS[term], height=0.62)
        axes.barh(row, one["mean_negative"], color=COLORS[term], height=0.62, alpha=0.55)
    widest = max(NOTHING_NATS, *(max(one["mean_positive"], -one["mean_negative"]) for one in statistics))
    for row, one in enumerate(statistics):
        axes.text(max(one["mean_positive"], 0) + 0.04 * widest, row, _nats(one["mean_abs"]), va="center")
    axes.axvline(0.0, color="#888888", linewidth=0.8)
    axes.set_yticks(range(len(terms)), terms)
    axes.invert_yaxis()
    axes.set_xlim(-1.15 * widest, 1.75 * widest)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4, symmetric=True))
    axes.xaxis.set_major_formatter(FuncFormatter(_plain))
    axes.set_xlabel("nats:  ← engine more likely | learner more likely →")
    axes.set_title("Size and sign (number: mean |nats|)")
    axes.grid(axis="x")
    axes.tick_params(length=0)


def _layers(axes: Axes, result: Mapping[str, Any]) -> None:
    axes.set_title("Quantization, layer by layer")
    layers = result["layers"]
    if not layers:
        quantized = result["rollout_precision"] in tuple(RolloutFormat)
        why = "formats not emulated" if quantized else "nothing is quantized"
        axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes, color="#777777")
        axes.set_axis_off()
        return
    numbers = [layer["layer"] for layer in layers]
    sizes = [layer["mean_abs"] for layer in layers]
    axes.bar(numbers, sizes, color=COLORS["quantization"], width=0.7)
    if len(layers) <= 12:
        for layer, size in zip(layers, sizes, strict=True):
            axes.text(layer["layer"], size, f"{100 * layer['share']:.0f} %", ha="center", va="bottom")
        axes.set_xticks(numbers)
    axes.set_ylim(top=1.15 * max(NOTHING_NATS, *sizes))
    axes.set_xlabel("decoder layer (%: its share of the term)")
    axes.set_ylabel("mean |nats| that the layer adds")
    axes.grid(axis="y")
    axes.tick_params(length=0)


def _quantiles(axes: Axes, result: Mapping[str, Any]) -> None:
    terms = [*shown_terms(result), "total"]
    extreme = NOTHING_NATS
    for row, term in enumerate(terms):
        quantiles = (result["total"] if term == "total" else result["terms"][term])["quantiles"]
        extreme = max(extreme, -quantiles["0.1"], quantiles["99.9"])
        for low, high, width in (("0.1", "99.9", 1.2), ("5", "95", 4.0), ("25", "75", 11.0)):
            axes.plot([quantiles[low], quantiles[high]], [row, row], color=COLORS[term], linewidth=width, alpha=0.75)
        axes.plot(quantiles["50"], row, "o", color="white", markersize=4, markeredgecolor=COLORS[term])
    axes.set_xscale("symlog", linthresh=max(extreme / 10, NOTHING_NATS), linscale=1.0)
    axes.axvline(0.0, color="#888888", linewidth=0.8)
    axes.set_yticks(range(len(terms)), terms)
    axes.set_ylim(len(terms) - 0.5, -0.5)
    axes.set_xlabel("nats (bars: middle 50, 90 and 99.8 % of the tokens)")
    axes.set_title("How the tokens spread")
    axes.grid(axis="x")
    axes.tick_params(length=0)
    step = 10.0 ** np.floor(np.log10(extreme))
    axes.set_xticks([-step, 0.0, step], [_plain(-step), "0", _plain(step)])
    axes.set_xlim(-1.6 * extreme, 1.6 * extreme)


def _positions(axes: Axes, result: Mapping[str, Any]) -> None:
    _lines(axes, result, result["by_position"])
    axes.set_xlabel("place of the token in the response")
    axes.set_title("By position")


def _entropies(axes: Axes, result: Mapping[str, Any]) -> None:
    _lines(axes, result, result["by_entropy"])
    axes.set_xlabel("entropy of the learner's distribution, nats")
    axes.set_title("By entropy (sure → unsure)")


def _lines(axes: Axes, result: Mapping[str, Any], buckets: Mapping[str, Any]) -> None:
    places = [at for at, count in enumerate(buckets["num_tokens"]) if count]
    if result["total"]["mean_abs"] <= NOTHING_NATS:
        axes.text(0.5, 0.5, "no gap", ha="center", va="center", transform=axes.transAxes, color="#777777")
        axes.set_axis_off()
        return
    least = max(NOTHING_NATS, SMALLEST_SHARE * max(buckets["mean_abs"]["total"][at] for at in places))
    for term in [*shown_terms(result), "total"]:
        values = np.array([buckets["mean_abs"][term][at] for at in places], float)
        if (values > least).any():
            style = "--" if term == "total" else "-"
            shown = np.where(values > least, values, np.nan)
            axes.plot(range(len(places)), shown, style, marker="o", markersize=4, color=COLORS[term], label=term)
    axes.set_yscale("log")
    axes.set_xticks(
        range(len(places)), [buckets["labels"][at] for at in places], fontsize=8.5 if len(places) < 6 else 7.5
    )
    axes.set_ylabel("mean |nats|")
    axes.grid(axis="y")
    axes.tick_params(length=0, which="both")
    axes.legend(loc="best", fontsize=8.5)


def _plain(value: float, _: object = None) -> str:
    """As few digits as there are, and no separate power of ten."""
    return "0" if value == 0 else f"{value:.3g}".replace("e-0", "e-")


def _nats(value: float) -> str:
    return "0" if value <= NOTHING_NATS else f"{value:.2g}"
