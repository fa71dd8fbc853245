"""Figures that are hard to draw: one step, curves that cover each other, values near a bound or far below."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.analysis.figures.drawing import Overlaps, _lowest_of_log, curve
from pipeline.analysis.html_report import sections
from pipeline.analysis.run_log import RunLog

WriteRun = Callable[..., Path]


@pytest.fixture
def run_log(write_run: WriteRun) -> RunLog:
    return RunLog.read(write_run(24))


def drawn(run_log: RunLog, values: list[Mapping[str, float]], *lines: tuple[str, str, str], **how: Any) -> str:
    metrics = [{"step": step, "time": float(step), **found} for step, found in enumerate(values)]
    svg = curve(replace(run_log, metrics=metrics), "figure", lines, **how)
    assert svg is not None
    return svg


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_a_log_axis_ends_five_decades_below_its_top_and_the_point_tells_its_value(run_log: RunLog) -> None:
    svg = drawn(run_log, [dict(g=1.0), dict(g=1e-15), dict(g=0.5)], ("g", "norm", "blue"), log=True)
    assert "<title>norm, 1: 1e-15</title>" in svg
    exponents = {int(found) for found in re.findall(r">(\d)</tspan>", svg)}
    assert exponents == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("values", "lowest"),
    [([1.0, 0.9], None), ([0.0, 0.0], None), ([-1.0, 1e-9], None), ([1.0, 0.01], 0.01), ([2.0, 0.0, 1e-9], 2e-5)],
)
def test_where_a_log_axis_begins(values: list[float], lowest: float | None) -> None:
    found = _lowest_of_log(np.array(values))
    assert found is None if lowest is None else found == pytest.approx(lowest)


def test_nothing_is_said_above_the_ceiling(run_log: RunLog) -> None:
    for values in ([1.0, 1.0], [0.99999, 1.0], [0.3, 0.9999]):
        svg = drawn(run_log, [dict(ess=value) for value in values], ("ess", "ESS", "blue"), ceiling=1.0)
        labels = [float(text) for text in texts(svg)[2:] if re.fullmatch(r"[\d.]+", text)]
        assert max(labels) == 1.0, labels
        assert len(set(labels)) > 1


def test_curves_that_cover_each_other_are_both_seen() -> None:
    overlaps = Overlaps(np.array([0.0, 1.0]))
    assert overlaps.dashes([0, 1, 2], [0.0, 0.5, 1.0]) == "-"
    assert overlaps.dashes([0, 1, 2], [0.0, 0.5, 1.0]) != "-"
    assert overlaps.dashes([0, 1, 2], [1.0, 0.0, 0.5]) == "-"
    assert overlaps.dashes([5, 6], [1.0, 0.0]) == "-"  # other places


def test_one_step_is_a_dot_whose_value_is_written_beside_it(run_log: RunLog) -> None:
    svg = drawn(run_log, [dict(a=0.125, b=0.25)], ("a", "first", "blue"), ("b", "second", "orange"))
    assert texts(svg)[0] == "0"  # the only step
    assert {"first 0.125", "second 0.25"} <= set(texts(svg))
    assert "figure 0.125" not in svg
    assert "one 0.5" in texts(drawn(run_log, [dict(a=0.5)], ("a", "one", "blue")))


def test_every_figure_of_a_run_of_one_step_names_that_step_alone(write_run: WriteRun) -> None:
    figures = [figure for part in sections(RunLog.read(write_run(1, steps=1))) for figure in part["figures"]]
    over_steps = [figure for figure in figures if ">step</text>" in figure["svg"]]
    assert len(over_steps) > 12
    assert [figure["title"] for figure in over_steps if texts(figure["svg"])[0] != "0"] == []


def test_a_dotted_line_marks_a_restart_and_a_changed_recipe(run_log: RunLog) -> None:
    lines = [dict(a=float(step % 3)) for step in range(8)]
    changed: dict[str, Any] = dict(kind="recipe_changed", time=0.0, step=5)
    restarted: dict[str, Any] = dict(kind="restarted", time=2.5)

    def dotted(*events: dict[str, Any]) -> int:
        svg = drawn(replace(run_log, events=list(events)), lines, ("a", "a", "blue"))
        return svg.count("stroke-dasharray: 0.9")

    assert [dotted(), dotted(changed), dotted(changed, restarted)] == [0, 1, 2]
    assert dotted(dict(changed, step=99)) == 0
