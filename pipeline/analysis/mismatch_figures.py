"""The figures of a report that say where learner and engine disagree, from the statistics of precision.mismatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from pipeline.analysis import figures
from pipeline.analysis.run_log import RunLog, number
from precision.mismatch.splits import SPLITS, Split

Named = tuple[str, str | None]
"""Title and <svg>, None without data."""

LAST_STEPS = 10
"""Over which the tokens of a bucket are counted together."""
WIDE_TITLES = (
    f"Mean gap of a token, nats, by what the token is (last {LAST_STEPS} steps)",
    f"1 − effective sample size, by what the token is (last {LAST_STEPS} steps; numbers are shares of the tokens)",
)
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
    """Small ones first, then the two that show all buckets."""

    def curve(name: str, lines: Sequence[tuple[str, str, str]], *, percent: bool = False) -> str | None:
        return figures.curve(run_log, name, lines, percent=percent)

    signs = [(f"mismatch/advantage/{sign}/ess", f"A {mark} 0", color) for sign, mark, color in _SIGNS]
    found = buckets(run_log)
    return [
        ("Effective sample size of sequences", curve("sequence ESS", _SEQUENCES)),
        ("Effective sample size by sign of A", curve("ESS by sign", signs)),
        ("Log-ratio of a token, nats", _quantiles(run_log)),
        ("Mean log-ratio, nats", curve("mean log-ratio", _GAPS)),
        ("Tokens beyond a factor of 2", curve("tails", _TAILS, percent=True)),
        ("Correlation of the two sides", curve("Pearson", _PEARSON)),
        (WIDE_TITLES[0], _gap_bars(found)),
        (WIDE_TITLES[1], _ess_bars(found)),
    ]


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
        for low, high, alpha, label in BANDS:
            ends = run_log.series(low)[1], run_log.series(high)[1]
            axes.fill_between(steps, *ends, color=figures.COLORS["blue"], alpha=alpha, linewidth=0, label=label)
        axes.plot(steps, median, color=figures.COLORS["ink"], linewidth=1.0, label="median")
        widest = max(map(abs, (*run_log.series("log_ratio_p1")[1], *run_log.series("log_ratio_p99")[1])))
        axes.set_ylim(-2.5 * widest - 1e-6, 2.5 * widest + 1e-6)  # one odd step must not flatten the rest
        figures.plain_values(axes)
        axes.set_xlabel("step")
        axes.legend(loc="upper left", fontsize=7, ncols=2)

    return figures.render("log-ratio quantiles", figures.SMALL, draw)


def _gap_bars(found: Sequence[Bucket]) -> str | None:
    def draw(axes: Axes) -> None:
        places = _bars(axes, found, [bucket.abs_gap for bucket in found])
        gaps = [bucket.gap for bucket in found]
        axes.plot(places, gaps, "D", color=figures.COLORS["ink"], markersize=3.5, label="signed mean")
        axes.axhline(0.0, color=figures.COLORS["muted"], linewidth=0.7)
        _legend(axes)

    return figures.render("gap by bucket", figures.WIDE, draw) if found else None


def _ess_bars(found: Sequence[Bucket]) -> str | None:
    def draw(axes: Axes) -> None:
        places = _bars(axes, found, [1.0 - bucket.ess for bucket in found])
        for place, bucket in zip(places, found, strict=True):
            axes.annotate(
                f"{100 * bucket.share:.2g} %",
                (place, 1.0 - bucket.ess),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=7,
                color=figures.COLORS["muted"],
            )
        axes.set_ylim(bottom=0.0, top=1.15 * max(1e-9, *(1.0 - bucket.ess for bucket in found)))
        _legend(axes)

    return figures.render("ESS by bucket", figures.WIDE, draw) if found else None


def _bars(axes: Axes, found: Sequence[Bucket], heights: Sequence[float]) -> list[float]:
    """One bar a bucket, with a space between two splits; returns their places."""
    places = [place + 0.8 * SPLITS.index(bucket.split) for place, bucket in enumerate(found)]
    for split in SPLITS:
        mine = [number for number, bucket in enumerate(found) if bucket.split is split]
        color = figures.COLORS[SPLIT_COLORS[split.name]]
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
    figures.plain_values(axes)
