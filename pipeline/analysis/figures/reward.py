"""The figures of a report about where rewards come from: the sources of the prompts, and the parts of the reward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from pipeline.analysis.figures import drawing
from pipeline.analysis.figures.drawing import Named
from pipeline.analysis.pages.hover import add_named_values
from pipeline.analysis.run_log import RunLog
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import StoreError

REWARDS_TEXT = (
    "Sources are those of the recipe's task; held-out prompts are drawn over versions, all else over steps. A part is "
    "the mean over the samples for which the reward named it."
)
_COLORS = ("blue", "orange", "teal", "violet", "pink", "green", "sand", "gray")
HISTOGRAM_TITLE = "Rewards of the samples"
_FIRST_TO_LAST = ("orange", "teal", "blue")
_MOST_VALUES, _BINS = 12, 24
_MOST_PARTS = 12
"""Drawn; the others are in the metrics."""


def held_out_figures(run_log: RunLog) -> list[Named]:
    """Title and <svg> of the rewards of held-out prompts, over versions; None where a run has none. Samples without a
    reward are drawn once an evaluation had one."""
    evaluated = _evaluated(run_log)
    title, failed = "Held-out samples without a reward", evaluated.series("verifier_failures")[1]
    return [
        ("Held-out reward", drawing.curve(evaluated, "held-out reward", [("reward_mean", "mean reward", "blue")])),
        ("Parts of the held-out reward", _all_parts(evaluated)),
        (title, _counted(evaluated, title, "verifier_failures", "pink", floor=0.0)[1] if any(failed) else None),
    ]


def reward_figures(run_log: RunLog) -> list[Named]:
    """Title and <svg>; None where the task has one source, or the reward no parts."""
    evaluated = _evaluated(run_log)
    return [
        (HISTOGRAM_TITLE, reward_histogram(run_log)),
        _counted(run_log, "Samples without a reward", "verifier_failures", "pink", floor=0.0),
        _counted(run_log, "Samples that the teacher did not score", "teacher_failures", "violet", floor=0.0),
        _counted(run_log, "Penalty for overlong responses", "overlong_penalty", "orange"),
        ("Reverse KL to the teacher, nats a token", _reverse_kl(run_log)),
        ("Held-out pass@1, by source", _by_source(evaluated, "pass_at_1", percent=True)),
        ("Held-out reward, by source", _by_source(evaluated, "reward_mean")),
        ("Reward, by source", _by_source(run_log, "reward_mean")),
        ("Solved, by source", _by_source(run_log, "solve_rate", percent=True)),
        ("Share of samples, by source", _by_source(run_log, "share", percent=True)),
        *(_of_part(run_log, name) for name in _names(run_log, "reward_parts")[:_MOST_PARTS]),
    ]


def _evaluated(run_log: RunLog) -> RunLog:
    """With evaluations in place of steps."""
    return replace(run_log, metrics=[{**found, "step": found["version"]} for found in run_log.evaluations])


def _all_parts(run_log: RunLog) -> str | None:
    """The first parts as lines of one figure."""
    names = _names(run_log, "reward_parts")[: len(_COLORS)]
    keys = {name: f"part {i}" for i, name in enumerate(names)}
    own = _reduced(run_log, lambda line: {key: _within(line, "reward_parts", name) for name, key in keys.items()})
    lines = [(key, name, _COLORS[i]) for i, (name, key) in enumerate(keys.items())]
    return drawing.curve(own, "parts of the held-out reward", lines)


def reward_histogram(run_log: RunLog) -> str | None:
    """Share of samples by their reward, of the first, the middle and the newest batch that is still there. Samples
    without a reward are left out. Few values are drawn one by one, many in bins."""
    found = _rewards(run_log)
    if not found:
        return None
    values = np.unique(np.concatenate([rewards for _, rewards in found]))
    edges = None if len(values) <= _MOST_VALUES else MaxNLocator(_BINS).tick_values(values[0], values[-1])
    names = [f"reward {value:.4g}" for value in values]
    if edges is not None:
        names = [f"reward {low:.4g} to {high:.4g}" for low, high in pairwise(edges)]

    def draw(axes: Axes) -> None:
        width = 0.8 / len(found)
        for place, ((batch, rewards), color) in enumerate(zip(found, _FIRST_TO_LAST[-len(found) :], strict=True)):
            counts = (rewards == values[:, None]).sum(axis=1) if edges is None else np.histogram(rewards, edges)[0]
            shares = counts / len(rewards)
            at = np.arange(len(names)) + (place - (len(found) - 1) / 2) * width
            label = f"batch {batch}, mean {rewards.mean():.4g}"
            axes.bar(at, shares, width, color=drawing.COLORS[color], label=label)
            told = [f"batch {batch}, {name}" for name in names]
            add_named_values(axes, at.tolist(), shares.tolist(), told, drawing.COLORS[color])
        if edges is None:
            axes.set_xticks(range(len(values)), [f"{value:.4g}" for value in values])
        else:
            axes.set_xticks(np.arange(len(edges))[::2] - 0.5, [f"{edge:.4g}" for edge in edges[::2]])
        axes.set_xlim(-0.6, len(names) - 0.4)
        axes.set_xlabel("reward of a sample")
        axes.yaxis.set_major_formatter(FuncFormatter(drawing.percent_label))
        drawing.legend_above(axes)

    return drawing.render(HISTOGRAM_TITLE, drawing.WIDE, draw)


def _rewards(run_log: RunLog) -> list[tuple[int, NDArray[np.float32]]]:
    """Batch and its rewards; batches that were removed, or are damaged, are passed over."""
    folder = RunDirectory(run_log.run_dir).batches
    if not folder.is_dir():
        return []
    store = BatchStore(folder)
    there = [index for index in store.committed() if index < run_log.num_steps]
    found = []
    for index in sorted({there[0], there[(len(there) - 1) // 2], there[-1]}) if there else []:
        with suppress(StoreError):
            batch = store.read_samples(index)
            if batch.judged.any():
                found.append((index, batch.reward[batch.judged]))
    return found


def _counted(run_log: RunLog, title: str, metric: str, color: str, floor: float | None = None) -> Named:
    return title, drawing.curve(run_log, title, [(metric, "samples", color)], floor=floor)


def _reverse_kl(run_log: RunLog) -> str | None:
    """Of a run that distills a teacher: on what is trained, and on held-out prompts by version."""
    held_out = {int(found["version"]): found.get("reverse_kl") for found in run_log.evaluations}
    trained = {int(line["step"]): line.get("reverse_kl") for line in run_log.metrics}
    steps = sorted({*held_out, *trained})
    lines = [dict(step=step, trained=trained.get(step), held_out=held_out.get(step)) for step in steps]
    own = [("trained", "trained on", "blue"), ("held_out", "held out, by version", "orange")]
    return drawing.curve(replace(run_log, metrics=lines, events=[]), "Reverse KL to the teacher", own)


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
