"""The figures of a report that say where learner and engine disagree, from the statistics of precision.mismatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from pipeline.analysis.figures import drawing
from pipeline.analysis.figures.drawing import Named
from pipeline.analysis.pages.hover import add_values
from pipeline.analysis.run_log import RunLog, number
from precision.mismatch.statistics import SPLITS, Split
from precision.ratios import LOG_RATIO_EDGES, NUM_LOG_RATIO_BINS

LAST_STEPS = 10
"""Over which the tokens of a bucket are counted together."""
WIDE_TITLES = (
    f"Mean gap of a token, nats, by what the token is (last {LAST_STEPS} steps)",
    f"1 − effective sample size, by what the token is (last {LAST_STEPS} steps; numbers are shares of the tokens)",
)
HISTOGRAM_TITLE = "Log-ratio of a token"
SPLIT_COLORS = dict(zip((split.name for split in SPLITS), ("violet", "blue", "teal", "orange"), strict=True))
BANDS = (
    ("log_ratio_p0_1", "log_ratio_p99_9", 0.12, "all but 0.2 %"),
    ("log_ratio_p1", "log_ratio_p99", 0.2, "all but 2 %"),
    ("log_ratio_p5", "log_ratio_p95", 0.35, "all but 10 %"),
)


@dataclass(frozen=True)
class Bucket:
    """The tokens of one bucket over some steps."""

    split: Split
    name: str
    share: float
    """Of all tokens of these steps."""
    ess: float
    abs_gap: float
    """Nats."""
    gap: float
    """Nats, signed."""


def mismatch_figures(run_log: RunLog) -> list[Named]:
    """Small ones first, then those that show all buckets."""

    def curve(name: str, lines: Sequence[tuple[str, str, str]], **how: Any) -> str | None:
        return drawing.curve(run_log, name, lines, **how)

    signs = [(f"mismatch/advantage/{sign}/ess", f"A {mark} 0", color) for sign, mark, color in _SIGNS]
    found = buckets(run_log)
    return [
        ("Effective sample size", ess(run_log, shows_kl_weight=run_log.recipe.objective.weighs_kl_by_step_ess)),
        ("KL from engine to learner, nats a token", curve("k3 KL", _KL, log=True)),
        ("Staleness, versions", curve("lag", _LAG, floor=0.0)),
        ("Effective sample size of sequences", curve("sequence ESS", _SEQUENCES, ceiling=1.0)),
        ("Effective sample size by sign of A", curve("ESS by sign", signs, ceiling=1.0)),
        ("Log-ratio of a token, nats", _quantiles(run_log)),
        ("Mean log-ratio, nats", curve("mean log-ratio", _GAPS)),
        ("Tokens beyond a factor of 2", curve("tails", _TAILS, percent=True, floor=0.0)),
        ("Correlation of the two sides", curve("Pearson", _PEARSON, ceiling=1.0)),
        (WIDE_TITLES[0], _gap_bars(found)),
        (WIDE_TITLES[1], _ess_bars(found)),
        (HISTOGRAM_TITLE, log_ratio_histogram(run_log)),
    ]


_KL = [("k3_kl", "k3", "blue"), ("k2_kl", "k2", "orange")]
_LAG = [("lag_max", "oldest token", "orange"), ("lag_mean", "mean", "blue")]
_SIGNS = (("positive", ">", "teal"), ("negative", "<", "orange"))
_SEQUENCES = [
    ("sequence_ess", "product of the ratios", "blue"),
    ("sequence_mean_ratio_ess", "geometric mean", "teal"),
]
_GAPS = [("log_ratio_abs_mean", "absolute", "blue"), ("log_ratio_mean", "signed", "orange")]
_TAILS = [("ratio_above_2_share", "ratio > 2", "blue"), ("ratio_below_half_share", "ratio < 1/2", "orange")]
_PEARSON = [("logprob_pearson", "log-probabilities", "blue"), ("probability_pearson", "probabilities", "teal")]


def buckets(run_log: RunLog) -> list[Bucket]:
    """Those that hold tokens of the last steps, in the order of the splits. Means are over tokens; the ESS is the
    tokens' mean of the steps' ESS, since each step is reweighted by itself."""
    lines = [line for line in run_log.metrics[-LAST_STEPS:] if line.get("mismatch")]
    total = sum(number(line, "num_tokens") or 0.0 for line in lines)
    found = []
    for split in SPLITS:
        for name in split.buckets:
            cells = [(line, line["mismatch"].get(split.name, {}).get(name)) for line in lines]
            known = [(cell, cell["share"] * (number(line, "num_tokens") or 0.0)) for line, cell in cells if cell]
            weight = sum(tokens for _, tokens in known)
            if weight > 0:
                means = {key: sum(cell[key] * tokens for cell, tokens in known) / weight for key in _MEANS}
                found.append(Bucket(split, name, weight / total, *(means[key] for key in _MEANS)))
    return found


_MEANS = ("ess", "log_ratio_abs_mean", "log_ratio_mean")


def _quantiles(run_log: RunLog) -> str | None:
    steps, median = run_log.series("log_ratio_p50")
    if not steps:
        return None

    def draw(axes: Axes) -> None:
        some = slice(None, None, 1 + len(steps) // drawing.MOST_DRAWN)
        for low, high, alpha, label in BANDS:
            ends = run_log.series(low)[1], run_log.series(high)[1]
            _band(axes, steps[some], ends[0][some], ends[1][some], alpha=alpha, label=label)
        marker = "_" if len(steps) == 1 else ""
        axes.plot(steps[some], median[some], color=drawing.COLORS["ink"], linewidth=1.0, marker=marker, label="median")
        add_values(axes, steps, median, "median", drawing.COLORS["ink"])
        widest = max(map(abs, (*run_log.series("log_ratio_p1")[1], *run_log.series("log_ratio_p99")[1])))
        axes.set_ylim(-2.5 * widest - 1e-6, 2.5 * widest + 1e-6)  # one odd step must not flatten the rest
        drawing.steps_axis(axes)
        axes.legend(loc="upper left", fontsize=7, ncols=2)

    return drawing.render("log-ratio quantiles", drawing.SMALL, draw)


def _band(
    axes: Axes, steps: Sequence[int], low: Sequence[float], high: Sequence[float], *, alpha: float, label: str
) -> None:
    """Between two quantiles; a single step is a bar."""
    color = drawing.COLORS["blue"]
    if len(steps) == 1:
        axes.bar(steps, high[0] - low[0], 0.12, low[0], color=color, alpha=alpha, linewidth=0, label=label)
    else:
        axes.fill_between(steps, low, high, color=color, alpha=alpha, linewidth=0, label=label)


def _gap_bars(found: Sequence[Bucket]) -> str | None:
    def draw(axes: Axes) -> None:
        places = _bars(axes, found, [bucket.abs_gap for bucket in found])
        gaps = [bucket.gap for bucket in found]
        axes.plot(places, gaps, "D", color=drawing.COLORS["ink"], markersize=3.5, label="signed mean")
        axes.axhline(0.0, color=drawing.COLORS["muted"], linewidth=0.7)
        _legend(axes)

    return drawing.render("gap by bucket", drawing.WIDE, draw) if found else None


def _ess_bars(found: Sequence[Bucket]) -> str | None:
    def draw(axes: Axes) -> None:
        places = _bars(axes, found, [1.0 - bucket.ess for bucket in found])
        for place, bucket in zip(places, found, strict=True):
            axes.annotate(
                drawing.percent_label(float(f"{bucket.share:.2g}")),
                (place, 1.0 - bucket.ess),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=7,
                color=drawing.COLORS["muted"],
            )
        axes.set_ylim(bottom=0.0, top=1.15 * max(1e-9, *(1.0 - bucket.ess for bucket in found)))
        _legend(axes)

    return drawing.render("ESS by bucket", drawing.WIDE, draw) if found else None


def _bars(axes: Axes, found: Sequence[Bucket], heights: Sequence[float]) -> list[float]:
    """One bar a bucket, with a space between two splits; returns their places."""
    places = [place + 0.8 * SPLITS.index(bucket.split) for place, bucket in enumerate(found)]
    for split in SPLITS:
        mine = [number for number, bucket in enumerate(found) if bucket.split is split]
        color = drawing.COLORS[SPLIT_COLORS[split.name]]
        axes.bar(
            [places[number] for number in mine],
            [heights[number] for number in mine],
            0.72,
            color=color,
            label=split.title,
        )
    axes.set_xticks(places, [_tick(bucket) for bucket in found], fontsize=7.5)
    axes.set_xlim(places[0] - 0.7, places[-1] + 0.7)
    return places


def _tick(bucket: Bucket) -> str:
    if bucket.split.name == "advantage":
        return {"negative": "A < 0", "zero": "A = 0", "positive": "A > 0"}[bucket.name]
    low, dash, high = bucket.name.partition("-")
    return f"≥ {low}" if dash and not high else bucket.name.replace("-", "–")


def _legend(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=5, columnspacing=1.1, fontsize=8, borderaxespad=0.2)
    drawing.plain_values(axes)


def ess(run_log: RunLog, *, shows_kl_weight: bool) -> str | None:
    """ESS over steps; with P3O the gap to 1 is the weight that its KL term gets."""
    steps, values = run_log.series("ess")
    if not steps:
        return None

    def draw(axes: Axes) -> None:
        drawing.draw_line(axes, steps, values, "ESS / tokens", "blue")
        if shows_kl_weight:
            some = drawing.extremes(values)
            lows = np.take(values, some)
            axes.fill_between(
                np.take(steps, some),
                lows,
                1.0,
                color=drawing.COLORS["orange"],
                alpha=0.25,
                linewidth=0,
                label="KL weight, 1 − ESS",
            )
        drawing.steps_axis(axes, ceiling=1.0)
        axes.legend(loc="best", fontsize=8)
        drawing.mark_restarts(axes, run_log)

    return drawing.render("effective sample size", drawing.SMALL, draw)


def log_ratio_histogram(run_log: RunLog) -> str | None:
    """Share of tokens in each log-ratio bin for the first, middle and last step that counted them.

    Bins are drawn equally wide, so the x axis is logarithmic on both sides of zero; the y axis is logarithmic too.
    """
    lines = [line for line in run_log.metrics if len(line.get("log_ratio_histogram") or ()) == NUM_LOG_RATIO_BINS]
    lines = [line for line in lines if sum(line["log_ratio_histogram"]) > 0]
    if not lines:
        return None
    chosen = sorted({0, (len(lines) - 1) // 2, len(lines) - 1})

    def draw(axes: Axes) -> None:
        used = []
        for position, color in zip(chosen, ("orange", "teal", "blue")[-len(chosen) :], strict=True):
            line = lines[position]
            counts = np.asarray(line["log_ratio_histogram"], float)
            used += list(np.flatnonzero(counts))
            value = number(line, "ess")
            label = f"step {line['step']}" + (f", ESS {value:.4f}" if value is not None else "")
            share = np.where(counts > 0, counts / counts.sum(), np.nan)
            axes.stairs(share, color=drawing.COLORS[color], label=label, linewidth=1.6, baseline=None)
        axes.set_yscale("log")
        ticks = [(edge + 1.0, _nats(value)) for edge, value in enumerate(LOG_RATIO_EDGES) if _is_tick(value)]
        ticks.append((NUM_LOG_RATIO_BINS / 2, "0"))
        axes.set_xticks([at for at, _ in ticks], [text for _, text in ticks])
        axes.set_xlim(min(used) - 0.5, max(used) + 1.5)
        axes.set_xlabel("log π(learner) − log π(engine) of a token, nats")
        axes.set_ylabel("share of tokens")
        drawing.legend_above(axes)

    return drawing.render("log-ratio histogram", drawing.WIDE, draw)


def _is_tick(edge: float) -> bool:
    """A power of ten; the smallest would run into the 0."""
    if abs(edge) < 2.0 * min(map(abs, LOG_RATIO_EDGES)):
        return False
    decade = np.log10(abs(edge))
    return bool(abs(decade - round(decade)) < 1e-6)


def _nats(edge: float) -> str:
    return f"{edge:.0e}".replace("e-0", "e-") if abs(edge) < 0.01 else f"{edge:g}"
