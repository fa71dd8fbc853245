"""The figures of a report: a RunLog in, inline SVG out.

Colors are drawn as placeholders and replaced by CSS variables, so that the page decides between light and dark.
Text stays text (searchable, in the page's font). A figure without data is None.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from pipeline.analysis.flight.timeline import COLLECTOR, LEARNER_PHASES, RANK_ZERO, STEP, Span
from pipeline.analysis.flight.timeline import timeline as spans_of
from pipeline.analysis.pages.hover import add_values, with_titles
from pipeline.analysis.run_log import RunLog, number
from precision.histogram import LOG_RATIO_EDGES, NUM_LOG_RATIO_BINS

# A machine without TeX-like fonts is told so for each of them, though nothing here is set in one.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

COLORS = {
    name: f"#fe00{index:02x}"
    for index, name in enumerate(
        ("ink", "muted", "grid", "surface", "blue", "orange", "green", "violet", "pink", "teal", "gray", "sand")
    )
}
"""Placeholder of each CSS variable `--NAME`."""

PHASE_COLORS = {
    "wait": "gray",
    "logprobs": "teal",
    "update": "violet",
    "publish": "orange",
    "record": "green",
    "save": "sand",
    "generate": "blue",
    "hold": "gray",
    "commit": "orange",
    "evaluate": "pink",
}

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
    return svg.replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)


def curve(
    run_log: RunLog,
    name: str,
    lines: Sequence[tuple[str, str, str]],
    *,
    percent: bool = False,
    log: bool = False,
    floor: float | None = None,
) -> str | None:
    """Metrics over steps; each line is (metric, label, color). `floor` is the lowest end of the y axis."""
    known = [(*run_log.series(metric), label, color) for metric, label, color in lines]
    known = [line for line in known if line[0]]
    if not known:
        return None

    def draw(axes: Axes) -> None:
        for steps, values, label, color in known:
            _line(axes, steps, values, label, color)
        _steps_axis(axes)
        _mark_restarts(axes, run_log)
        shown = np.concatenate([values for _, values, _, _ in known])
        if log and shown.min() > 0 and shown.max() > LOG_FROM_RATIO * shown.min():
            axes.set_yscale("log")
        elif floor is not None:
            axes.set_ylim(bottom=floor)
        if percent:
            axes.yaxis.set_major_formatter(FuncFormatter(_percent))
        if len(known) > 1:
            axes.legend(loc="best", fontsize=8)

    return render(name, SMALL, draw)


def held_out(run_log: RunLog) -> str | None:
    """pass@1 with its 95 % interval, and pass@k for the largest k, by policy version."""
    events = [event for event in run_log.evaluations if number(event, "pass_at_1") is not None]
    if not events:
        return None
    versions = [int(event["version"]) for event in events]
    k = max((int(k) for event in events for k in event.get("pass_at_k") or {}), default=1)

    def draw(axes: Axes) -> None:
        low = [number(event, "pass_at_1_low") for event in events]
        high = [number(event, "pass_at_1_high") for event in events]
        if all(value is not None for value in (*low, *high)):
            axes.fill_between(versions, low, high, color=COLORS["blue"], alpha=0.15, linewidth=0)  # type: ignore[arg-type]
        many = [(v, number(event.get("pass_at_k") or {}, str(k))) for v, event in zip(versions, events, strict=True)]
        known = [(v, value) for v, value in many if value is not None]
        if k > 1 and known:
            axes.plot(*zip(*known, strict=True), color=COLORS["teal"], marker="o", markersize=3, label=f"pass@{k}")
        first = [float(event["pass_at_1"]) for event in events]
        add_values(axes, versions, first, "pass@1", COLORS["blue"])
        axes.plot(versions, first, color=COLORS["blue"], marker="o", markersize=4, label="pass@1")
        axes.annotate(
            _percent(round(first[-1], 3)),
            (versions[-1], first[-1]),
            (6, -3),
            textcoords="offset points",
            fontweight="bold",
        )
        _steps_axis(axes, "policy version")
        axes.margins(x=0.07)
        axes.set_ylim(bottom=0.0)
        axes.yaxis.set_major_formatter(FuncFormatter(_percent))
        axes.legend(loc="best")

    return render("held-out pass@1", WIDE, draw)


def ess(run_log: RunLog, *, shows_kl_weight: bool) -> str | None:
    """ESS over steps; with P3O the gap to 1 is the weight that its KL term gets."""
    steps, values = run_log.series("ess")
    if not steps:
        return None

    def draw(axes: Axes) -> None:
        _line(axes, steps, values, "ESS / tokens", "blue")
        if shows_kl_weight:
            axes.fill_between(
                steps, values, 1.0, color=COLORS["orange"], alpha=0.25, linewidth=0, label="KL weight, 1 − ESS"
            )
        bottom = min(values)
        axes.set_ylim(max(0.0, bottom - 0.15 * (1.0 - bottom) - 1e-4), 1.0)
        axes.legend(loc="lower left", fontsize=8)
        _steps_axis(axes)
        _mark_restarts(axes, run_log)

    return render("effective sample size", SMALL, draw)


def phase_seconds(run_log: RunLog) -> str | None:
    """Seconds of each learner phase, stacked over steps."""
    lines = [line for line in run_log.metrics if line.get("seconds")]
    if not lines:
        return None
    steps = np.array([int(line["step"]) for line in lines])
    phases = [phase for phase in LEARNER_PHASES if any(phase in line["seconds"] for line in lines)]
    seconds = np.array([[float(line["seconds"].get(phase, 0.0)) for phase in phases] for line in lines])
    bins = np.array_split(np.arange(len(steps)), min(len(steps), 160))
    centers = np.array([steps[chosen].mean() for chosen in bins])
    heights = np.array([seconds[chosen].mean(axis=0) for chosen in bins])

    def draw(axes: Axes) -> None:
        bottom = np.zeros(len(centers))
        width = 0.86 * (steps[-1] - steps[0] + 1) / len(bins)
        for column, phase in enumerate(phases):
            axes.bar(centers, heights[:, column], width, bottom, color=COLORS[PHASE_COLORS[phase]], label=phase)
            bottom += heights[:, column]
        # One slow step, such as the first, must not flatten the rest.
        axes.set_ylim(0.0, max(1e-9, min(bottom.max(), 3.0 * float(np.quantile(bottom, 0.9)))) * 1.05)
        axes.margins(x=0.01)
        axes.set_ylabel("seconds")
        _steps_axis(axes)
        _legend_above(axes)

    return render("seconds of each phase", WIDE, draw)


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
            axes.stairs(share, color=COLORS[color], label=label, linewidth=1.6, baseline=None)
        axes.set_yscale("log")
        ticks = [(edge + 1.0, _nats(value)) for edge, value in enumerate(LOG_RATIO_EDGES) if _is_tick(value)]
        ticks.append((NUM_LOG_RATIO_BINS / 2, "0"))
        axes.set_xticks([at for at, _ in ticks], [text for _, text in ticks])
        axes.set_xlim(min(used) - 0.5, max(used) + 1.5)
        axes.set_xlabel("log π(learner) − log π(engine) of a token, nats")
        axes.set_ylabel("share of tokens")
        _legend_above(axes)

    return render("log-ratio histogram", WIDE, draw)


def timeline(run_log: RunLog, *, num_steps: int = 12) -> str | None:
    """The phases of learner and collector over the last `num_steps` steps, as bars against the clock."""
    spans = spans_of(run_log)
    phases = [s for s in spans if s.part == RANK_ZERO and s.lane == STEP and s.name in LEARNER_PHASES]
    first = max((s.number for s in phases), default=0) + 1 - num_steps
    steps = [replace(s, lane="learner") for s in phases if s.number >= first]
    if not steps:
        return None
    begin, end = min(s.start for s in steps), max(s.end for s in steps)
    collected = [s for s in spans if s.part == COLLECTOR and s.name in PHASE_COLORS]
    # What follows the last step, such as the final evaluation, may take a fifth of the picture.
    end = min(begin + 1.25 * (end - begin), max([end, *(s.end for s in collected)]))
    others = [s for s in collected if s.end > begin and s.start < end]
    lanes = ["learner", *sorted({s.lane for s in others})]

    def draw(axes: Axes) -> None:
        for span in (*steps, *others):
            _bar(axes, span, lanes.index(span.lane), begin, end)
        axes.set_xlim(0.0, end - begin)
        axes.set_ylim(len(lanes) - 0.5, -0.5)
        axes.set_yticks(range(len(lanes)), [_lane_label(lane, lanes) for lane in lanes])
        axes.grid(visible=False)
        axes.grid(visible=True, axis="x")
        axes.set_xlabel("seconds")
        names = {span.name for span in (*steps, *others)}
        for phase, color in PHASE_COLORS.items():
            if phase in names:
                axes.bar([0.0], [0.0], color=COLORS[color], label=phase)
        _legend_above(axes)

    return render("timeline", (WIDE[0], 0.85 + 0.32 * len(lanes)), draw)


def _bar(axes: Axes, span: Span, row: int, begin: float, end: float) -> None:
    start, stop = max(span.start, begin), min(span.end, end)
    color = COLORS[PHASE_COLORS[span.name]]
    axes.barh(row, stop - start, 0.72, start - begin, color=color, edgecolor=COLORS["surface"], linewidth=0.5)
    if span.name in ("update", "generate", "evaluate") and (stop - start) > 0.015 * (end - begin):
        axes.text(
            (start + stop) / 2 - begin,
            row,
            str(span.number),
            ha="center",
            va="center",
            fontsize=7,
            color=COLORS["surface"],
        )


def _lane_label(lane: str, lanes: Sequence[str]) -> str:
    return "batches" if lane == "batches 1" and "batches 2" not in lanes else lane


def _line(axes: Axes, steps: Sequence[int], values: Sequence[float], label: str, color: str) -> None:
    """A line, or for a long run a faint line under its running mean; a single step is a dot. Points tell values."""
    add_values(axes, steps, values, label, COLORS[color])
    if len(steps) < SMOOTH_FROM_STEPS:
        axes.plot(steps, values, color=COLORS[color], label=label, marker="o" if len(steps) == 1 else "")
        return
    axes.plot(steps, values, color=COLORS[color], alpha=0.3, linewidth=0.8)
    axes.plot(steps, _running_mean(values, len(values) // 20), color=COLORS[color], label=label)


def _running_mean(values: Sequence[float], window: int) -> NDArray[np.float64]:
    """Mean of the last `window` values, of fewer at the start."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return np.asarray((total[ends] - total[starts]) / (ends - starts))


def _steps_axis(axes: Axes, label: str = "step") -> None:
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    plain_values(axes)


def plain_values(axes: Axes) -> None:
    """A linear y axis of at most six digits a label, and no exponent beside the axis, where legends are.

    A range that six digits cannot tell apart is widened: a curve that differs by rounding is drawn flat.
    """
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: re.sub(r"e([+-])0", r"e\1", f"{value:.6g}")))
    low, high = axes.get_ylim()
    least = 2e-4 * max(abs(low), abs(high))
    if high - low < least:
        axes.set_ylim((low + high - least) / 2, (low + high + least) / 2)


def _mark_restarts(axes: Axes, run_log: RunLog) -> None:
    """A dotted line at the first step that ended after each restart."""
    for event in run_log.of_kind("restarted"):
        after = next((line["step"] for line in run_log.metrics if line["time"] > event["time"]), None)
        if after is not None:
            axes.axvline(after, color=COLORS["muted"], linestyle=":", linewidth=0.9)


def _legend_above(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=10, columnspacing=1.1, fontsize=8, borderaxespad=0.2)


def _percent(share: float, _: object = None) -> str:
    return f"{100 * share:.6g} %"


def _is_tick(edge: float) -> bool:
    """A power of ten; the smallest would run into the 0."""
    if abs(edge) < 2.0 * min(map(abs, LOG_RATIO_EDGES)):
        return False
    decade = np.log10(abs(edge))
    return bool(abs(decade - round(decade)) < 1e-6)


def _nats(edge: float) -> str:
    return f"{edge:.0e}".replace("e-0", "e-") if abs(edge) < 0.01 else f"{edge:g}"


def share_bar(shares: dict[str, float]) -> list[dict[str, Any]]:
    """Segments of a horizontal bar in HTML: phase, share, CSS color."""
    return [dict(phase=phase, share=share, color=PHASE_COLORS[phase]) for phase, share in shares.items() if share > 0]
