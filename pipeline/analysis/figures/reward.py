"""The figures of a report about where rewards come from: the sources of the prompts, and the parts of the reward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pipeline.analysis.figures import drawing
from pipeline.analysis.figures.drawing import Named
from pipeline.analysis.run_log import RunLog

REWARDS_TEXT = (
    "Sources are those of the recipe's task; held-out prompts are drawn over versions, all else over steps. A part is "
    "the mean over the samples for which the reward named it."
)
_COLORS = ("blue", "orange", "teal", "violet", "pink", "green", "sand", "gray")
_MOST_PARTS = 12
"""Drawn; the others are in the metrics."""


def reward_figures(run_log: RunLog) -> list[Named]:
    """Title and <svg>; None where the task has one source, or the reward no parts."""
    evaluated = [{**found, "step": found["version"]} for found in run_log.evaluations]
    return [
        ("Held-out pass@1, by source", _by_source(replace(run_log, metrics=evaluated), "pass_at_1", percent=True)),
        ("Reward, by source", _by_source(run_log, "reward_mean")),
        ("Solved, by source", _by_source(run_log, "solve_rate", percent=True)),
        ("Share of samples, by source", _by_source(run_log, "share", percent=True)),
        *(_of_part(run_log, name) for name in _names(run_log, "reward_parts")[:_MOST_PARTS]),
    ]


def _by_source(run_log: RunLog, metric: str, *, percent: bool = False) -> str | None:
    names = _names(run_log, "sources")
    keys = {name: f"source {i}" for i, name in enumerate(names)}
    own = _reduced(run_log, lambda line: {key: _within(line, "sources", name, metric) for name, key in keys.items()})
    lines = [(key, name, _COLORS[i % len(_COLORS)]) for i, (name, key) in enumerate(keys.items())]
    return drawing.curve(own, f"{metric} by source", lines, percent=percent, floor=0.0 if percent else None)


def _of_part(run_log: RunLog, name: str) -> Named:
    own = _reduced(run_log, lambda line: {"part": _within(line, "reward_parts", name)})
    return f"Reward part: {name}", drawing.curve(own, f"reward part {name}", [("part", name, "teal")])


def _reduced(run_log: RunLog, values: Callable[[dict[str, Any]], dict[str, Any]]) -> RunLog:
    """With these values alone: names that users gave may be spelled like the keys of something else."""
    return replace(run_log, metrics=[{"step": line["step"], **values(line)} for line in run_log.metrics])


def _within(line: Any, *keys: str) -> Any:
    for key in keys:
        line = line.get(key) if isinstance(line, dict) else None
    return line


def _names(run_log: RunLog, key: str) -> list[str]:
    """In the order in which they came up first."""
    return list(dict.fromkeys(name for line in run_log.metrics for name in _within(line, key) or ()))
