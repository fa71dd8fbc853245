"""Figures that are hard to draw: one step, curves that cover each other, values near a bound or far below."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from pipeline.analysis.drawing import curve, extremes, running_mean, steps_axis
from pipeline.analysis.figures import sections
from pipeline.analysis.run_log import RunLog

WriteRun = Callable[..., Path]


def drawn(*values: list[float], **how: Any) -> str:
    svg = curve("figure", [(range(len(ys)), ys, f"line {n}", "blue") for n, ys in enumerate(values)], **how)
    assert svg is not None
    return svg


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_a_log_axis_ends_five_decades_below_its_top_and_the_point_tells_its_value() -> None:
    svg = drawn([1.0, 1e-15, 0.5], log=True)
    assert "<title>line 0, 1: 1e-15</title>" in svg
    exponents = {int(found) for found in re.findall(r">(\d)</tspan>", svg)}
    assert exponents == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize("values", [[1.0, 0.9], [0.0, 0.0], [-1.0, 1e-9]])
def test_an_axis_that_shows_all_is_linear(values: list[float]) -> None:
    assert "</tspan>" not in drawn(values, log=True)


def test_one_step_is_a_dot_whose_value_is_written_beside_it() -> None:
    svg = drawn([0.125], [0.25])
    assert texts(svg)[0] == "0"  # the only step
    assert {"line 0 0.125", "line 1 0.25"} <= set(texts(svg))
    assert "line 0 0.5" in texts(drawn([0.5]))


def test_every_figure_of_a_run_of_one_step_names_that_step_alone(write_run: WriteRun) -> None:
    figures = [figure for part in sections(RunLog.read(write_run(1, steps=1))) for figure in part.figures]
    over_steps = [figure for figure in figures if ">step</text>" in figure.svg]
    assert len(over_steps) > 7
    assert [figure.title for figure in over_steps if texts(figure.svg)[0] != "0"] == []


def test_a_dotted_line_marks_a_restart_and_a_changed_recipe(write_run: WriteRun) -> None:
    run_log = RunLog.read(write_run(8))
    changed: dict[str, Any] = dict(kind="recipe_changed", time=0.0, step=5)
    restarted: dict[str, Any] = dict(kind="restarted", time=run_log.metrics[2]["time"] + 0.5)

    def dotted(*events: dict[str, Any]) -> int:
        parts = sections(replace(run_log, events=list(events)))
        [svg] = [figure.svg for part in parts for figure in part.figures if figure.title == "Training reward"]
        return svg.count("stroke-dasharray: 0.9")

    assert [dotted(), dotted(changed), dotted(changed, restarted)] == [0, 1, 2]
    assert dotted(dict(changed, step=99)) == 0


@pytest.mark.parametrize("values", [(1 / 3, 1 / 3 + 1e-12), (1.1e-6, 3.7e-6), (0.0, 0.0), (2e9, 2.5e9)])
def test_labels_of_an_axis_are_short_differ_and_have_no_exponent_beside_them(values: tuple[float, float]) -> None:
    figure = Figure()
    axes = figure.add_subplot()
    axes.plot([0, 1], values)
    steps_axis(axes)
    figure.draw_without_rendering()
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert max(map(len, labels)) <= 9
    assert len(set(labels)) == len(labels) > 1
    assert axes.yaxis.get_offset_text().get_text() == ""


def test_what_is_drawn_of_a_long_curve() -> None:
    values = [0.0] * 30_000
    values[17_001], values[17_002] = 5.0, -5.0
    shown = extremes(values).tolist()
    assert {0, 17_001, 17_002, 29_999} <= set(shown)
    assert len(shown) < 1500
    assert running_mean([2.0, 4.0, 6.0, 8.0], 2) == pytest.approx([2.0, 3.0, 5.0, 7.0])
