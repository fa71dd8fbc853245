"""What the ESS controller did, in a report: the ESS of each batch against the floor, with its decisions."""

from __future__ import annotations

from matplotlib.axes import Axes

from pipeline.analysis.figures.drawing import COLORS, WIDE, Named, draw_line, render, steps_axis
from pipeline.analysis.run_log import RunLog
from pipeline.control.files import ControlFiles, ControlRecord
from pipeline.data.run_directory import RunDirectory, unfenced

TITLE = "ESS, floor and decisions"


def decisions(run_log: RunLog) -> list[ControlRecord]:
    """From the records, which hold each decision once; the events may have lost or repeated one."""
    if run_log.recipe.controller is None:
        return []
    return ControlFiles(RunDirectory(run_log.run_dir).control, unfenced).decisions()


def control_text(run_log: RunLog) -> str:
    """Each decision in a sentence; empty without a controller."""
    settings = run_log.recipe.controller
    if settings is None:
        return ""
    found = decisions(run_log)
    told = [
        f"({number}) After step {record.step}: {record.decision.rung}. {record.decision.because}"
        for number, record in enumerate(found, start=1)
        if record.decision is not None
    ]
    last = ControlFiles(RunDirectory(run_log.run_dir).control, unfenced).newest()
    if last is not None and last.state.cannot_help:
        told.append("The ESS is below the floor, and no rung is left that could raise it to the floor.")
    return " ".join(told) or f"The ESS has needed no decision; its floor is {settings.ess_floor:g}."


def control_figures(run_log: RunLog) -> list[Named]:
    """One wide figure; none without a controller."""
    settings = run_log.recipe.controller
    steps, values = run_log.series("ess")
    if settings is None or not steps:
        return []
    found = decisions(run_log)

    def draw(axes: Axes) -> None:
        draw_line(axes, steps, values, "ESS / tokens", "blue")
        axes.axhline(settings.ess_floor, color=COLORS["muted"], linewidth=1.0, linestyle="--", label="floor")
        steps_axis(axes, ceiling=1.0)
        for number, record in enumerate(found, start=1):
            down = record.decision is not None and record.decision.action == "descend"
            color = COLORS["teal" if down else "orange"]
            axes.axvline(record.step, color=color, linewidth=1.2)
            axes.annotate(
                str(number), (record.step, axes.get_ylim()[1]), (2, -9), textcoords="offset points", color=color
            )
        axes.legend(loc="lower left", fontsize=8)

    return [(TITLE, render("ESS under control", WIDE, draw))]
