"""The figures of a report that say where the time goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from pipeline.analysis.figures.drawing import COLORS, WIDE, Named, legend_above, render, steps_axis
from pipeline.analysis.flight.timeline import COLLECTOR, LEARNER_PHASES, RANK_ZERO, Span, last_steps
from pipeline.analysis.run_log import RunLog

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
    "wait for rollouts": "gray",
    "wait for evaluations": "pink",
    "wait for commits": "blue",
}

TIMELINE_TITLE = "Timeline of the last steps"
PHASES_TITLE = "Learner, seconds a step"


def timing_figures(run_log: RunLog) -> list[Named]:
    """What each side did when, and how long the learner's phases took."""
    return [(TIMELINE_TITLE, timeline_of_last(run_log)), (PHASES_TITLE, phase_seconds(run_log))]


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
        steps_axis(axes)
        legend_above(axes)

    return render("seconds of each phase", WIDE, draw)


def timeline_of_last(run_log: RunLog, *, num_steps: int = 12) -> str | None:
    """The phases of learner and collector over the last `num_steps` steps, as bars against the clock."""
    spans = last_steps(run_log, num_steps)
    steps = [replace(s, lane="learner") for s in spans if s.part == RANK_ZERO and s.name in LEARNER_PHASES]
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
        legend_above(axes)

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


def share_bar(shares: dict[str, float]) -> list[dict[str, Any]]:
    """Segments of a horizontal bar in HTML: phase, share, CSS color."""
    return [dict(phase=phase, share=share, color=PHASE_COLORS[phase]) for phase, share in shares.items() if share > 0]
