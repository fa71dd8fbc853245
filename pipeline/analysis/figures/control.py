"""What the ESS controller did, in a report: the ESS of each batch against the floor that held for it, with the
decisions. A fork may have another floor than its parent, or the controller that its parent lacked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from matplotlib.axes import Axes

from pipeline.analysis.figures.drawing import COLORS, WIDE, Named, draw_line, render, steps_axis
from pipeline.analysis.run_log import RunLog
from pipeline.control.files import ControlFiles, ControlRecord
from pipeline.data.run_directory import RunDirectory, unfenced
from precision.controller.records import ControllerSettings

TITLE = "ESS, floor and decisions"


def decisions(run_log: RunLog) -> list[ControlRecord]:
    """From the records, which hold each decision once; the events may have lost or repeated one."""
    if _newest_settings(run_log) is None:
        return []
    return ControlFiles(RunDirectory(run_log.run_dir).control, unfenced).decisions()


def floors(run_log: RunLog, steps: Sequence[int]) -> list[tuple[float, int, int]]:
    """(floor, first step, last step) of each stretch of steps that had one floor; steps without a controller have
    none."""

    def floor_of(step: int) -> float | None:
        settings = run_log.recipe_of(step).controller
        return None if settings is None else settings.ess_floor

    stretches = [(floor, list(own)) for floor, own in groupby(steps, key=floor_of)]
    return [(floor, own[0], own[-1]) for floor, own in stretches if floor is not None]


def _newest_settings(run_log: RunLog) -> ControllerSettings | None:
    """Of the run, or of the last of its steps that had a controller."""
    trained = (run_log.recipe_of(int(line["step"])) for line in reversed(run_log.metrics))
    return next((one.controller for one in (run_log.recipe, *trained) if one.controller is not None), None)


def control_text(run_log: RunLog) -> str:
    """Each decision in a sentence; empty without a controller."""
    settings = _newest_settings(run_log)
    if settings is None:
        return ""
    found = decisions(run_log)
    told = [
        f"({number}) After step {record.step}: {record.decision.rung}. {record.decision.because}"
        for number, record in enumerate(found, start=1)
        if record.decision is not None
    ]
    last = ControlFiles(RunDirectory(run_log.run_dir).control, unfenced).newest()
    if run_log.recipe.controller is not None and last is not None and last.state.cannot_help:
        told.append("The ESS is below the floor, and no rung is left that could raise it to the floor.")
    return " ".join(told) or f"The ESS has needed no decision; its floor is {settings.ess_floor:g}."


def control_figures(run_log: RunLog) -> list[Named]:
    """One wide figure; none without a controller."""
    steps, values = run_log.series("ess")
    if _newest_settings(run_log) is None or not steps:
        return []
    found, held = decisions(run_log), floors(run_log, steps)

    def draw(axes: Axes) -> None:
        draw_line(axes, steps, values, "ESS / tokens", "blue")
        if held:
            heights, first, last = ([one[i] for one in held] for i in range(3))
            style: dict[str, Any] = dict(colors=COLORS["muted"], linewidth=1.0, linestyles="--", label="floor")
            axes.hlines(heights, [step - 0.5 for step in first], [step + 0.5 for step in last], **style)
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
