"""Figures that are hard to draw: one step, curves that cover each other, values near a bound or far below."""

from __future__ import annotations

import re
from typing import Any

import pytest
from matplotlib.figure import Figure

from pipeline.analysis.drawing import curve, extremes, running_mean, steps_axis


def drawn(*values: list[float], **how: Any) -> str:
    svg = curve("figure", [(range(len(ys)), ys, f"line {n}", "blue") for n, ys in enumerate(values)], **how)
    assert svg is not None
    return svg


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_one_step_is_a_dot_whose_value_is_written_beside_it() -> None:
    svg = drawn([0.125], [0.25])
    assert texts(svg)[0] == "0"  # the only step
    assert {"line 0 0.125", "line 1 0.25"} <= set(texts(svg))
    assert "line 0 0.5" in texts(drawn([0.5]))


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
