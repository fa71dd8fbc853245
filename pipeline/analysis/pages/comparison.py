"""One HTML page that tells how several runs differ: what they reached, which recipe keys differ, and their curves over
steps, samples and seconds. Nothing is fetched, and no script runs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from matplotlib.axes import Axes

from pipeline.analysis.figures import drawing
from pipeline.analysis.html_report import count, decimal, duration, percent
from pipeline.analysis.pages.hover import add_values
from pipeline.analysis.pages.style import page_style
from pipeline.analysis.run_list import compare_runs
from pipeline.analysis.run_log import RunLog, number
from pipeline.analysis.steps import spent_by_version, steps_of
from pipeline.data.files import write_atomically

CURVES = (
    ("pass_at_1", "Held-out pass@1"),
    ("reward_mean", "Training reward"),
    ("entropy", "Entropy, nats a token"),
    ("ess", "ESS / tokens"),
    ("k3_kl", "KL from engine to learner, nats a token"),
    ("grad_norm", "Gradient norm"),
    ("response_tokens_mean", "Response length, tokens"),
    ("lr", "Learning rate"),
)
"""Metric and title; the first is of evaluations."""

AXES = dict(steps="steps", samples="samples", seconds="seconds since the start of the run")
"""What the curves are drawn over, and what the axis says."""

_COLORS = ("blue", "orange", "green", "violet", "pink", "teal", "sand", "gray")
_DASHES = ("-", "--", ":", "-.")


def write_comparison(paths: Sequence[Path], page: Path) -> Path:
    """Write the page. Raises as pipeline.analysis.run_list.compare_runs."""
    compared = compare_runs(paths)
    logs = [RunLog.read(path) for path in paths]
    runs = [
        dict(path=str(path), color=_COLORS[i % len(_COLORS)], dashes=_DASHES[i // len(_COLORS) % len(_DASHES)])
        for i, path in enumerate(paths)
    ]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters.update(percent=percent, decimal=decimal, duration=duration, count=count)
    source = resources.files("pipeline.analysis").joinpath("pages/comparison.html.j2").read_text(encoding="utf-8")
    text = environment.from_string(source).render(
        style=page_style(),
        runs=[{**run, **told} for run, told in zip(runs, compared["runs"], strict=True)],
        recipe=compared["recipe"],
        axes={over: _figures(logs, runs, over) for over in AXES},
    )
    write_atomically(page, text)
    return page


def positions(run_log: RunLog) -> dict[str, dict[int, float]]:
    """Of each axis: steps done → the place on it. Samples are those of the batches trained, up to the first of
    which they are not known; seconds count from the first line of the logs, with the pauses between two starts."""
    steps = steps_of(run_log)
    begin = min((float(line["time"]) for line in (*run_log.events, *run_log.metrics)), default=0.0)
    ended = [begin, *(begin if step.ended is None else step.ended for step in steps)]
    return dict(
        steps={done: float(done) for done in range(len(steps) + 1)},
        samples=dict(enumerate(spent_by_version(steps, "samples"))),
        seconds={done: time - begin for done, time in enumerate(itertools.accumulate(ended, max))},
    )


def series(run_log: RunLog, metric: str, over: str) -> tuple[list[float], list[float]]:
    """Places on the axis `over`, and values; steps without a value are left out."""
    lines: list[tuple[int, Mapping[str, Any]]] = [(int(line["step"]) + 1, line) for line in run_log.metrics]
    if metric == "pass_at_1":
        lines = [(int(event["version"]), event) for event in run_log.evaluations]
    places = positions(run_log)[over]
    known = [
        (places[done], value) for done, line in lines if (value := number(line, metric)) is not None and done in places
    ]
    return [x for x, _ in known], [y for _, y in known]


def _figures(logs: Sequence[RunLog], runs: Sequence[Mapping[str, str]], over: str) -> list[dict[str, str]]:
    drawn = [(title, _figure(logs, runs, metric, over)) for metric, title in CURVES]
    return [dict(title=title, svg=svg) for title, svg in drawn if svg is not None]


def _figure(logs: Sequence[RunLog], runs: Sequence[Mapping[str, str]], metric: str, over: str) -> str | None:
    lines = [(*series(run_log, metric, over), run) for run_log, run in zip(logs, runs, strict=True)]
    lines = [line for line in lines if line[0]]
    if not lines:
        return None

    def draw(axes: Axes) -> None:
        overlaps = drawing.Overlaps(np.concatenate([ys for _, ys, _ in lines]))
        for xs, ys, run in lines:
            dashes = overlaps.dashes(xs, ys)
            color = drawing.COLORS[run["color"]]
            dotted = len(xs) <= 12 or metric == "pass_at_1"
            axes.plot(
                xs,
                ys,
                color=color,
                linestyle=run["dashes"] if dashes == "-" else dashes,
                marker="o" if dotted else "",
                markersize=3,
            )
            add_values(axes, xs, ys, run["path"], color)
        drawing.steps_axis(axes, AXES[over], ceiling=1.0 if metric == "ess" else None)
        if metric == "pass_at_1":
            drawing.begin_at(axes, 0.0)

    return drawing.render(f"{metric} over {over}", drawing.SMALL, draw)
