"""Compare runs: their summaries, the recipe keys in which they differ, and an HTML page of their curves over steps,
samples and seconds. The page fetches nothing and runs no script."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.analysis.run_log import RunLog, number, spent_by_version, steps_of
from pipeline.analysis.summary import count, decimal, duration, percent, summarize
from pipeline.data.files import write_atomically
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RecipeError
from pipeline.resume import reward_code

CURVES = (
    ("pass_at_1", "Held-out pass@1"),
    ("reward_mean", "Training reward"),
    ("entropy", "Entropy, nats a token"),
    ("ess", "Effective sample size"),
    ("k3_kl", "KL from engine to learner, nats a token"),
    ("grad_norm", "Gradient norm"),
    ("response_tokens_mean", "Response length, tokens"),
    ("lr", "Learning rate"),
)
"""Metric and title of each figure; pass_at_1 is a metric of evaluations, the others of steps."""
AXES = dict(steps="steps", samples="samples", seconds="seconds since the start of the run")
MISSING = "–"
"""Shown for a key that a run's recipe does not have."""
_COLORS = ("blue", "orange", "green", "violet", "pink", "teal", "sand", "gray")


def compare_runs(paths: Sequence[Path], page: Path | None = None) -> dict[str, Any]:
    """Return the summary of each run, and each recipe key in which two runs differ, with its value in every run; with
    `page`, write the page. Raises RecipeError (fewer than two runs, or one of them twice) and StoreError."""
    if len(paths) < 2:
        raise RecipeError(f"{len(paths)} run was given, expected at least two; give more, or use `evenkeel runs show`")
    if len({path.resolve() for path in paths}) < len(paths):
        raise RecipeError("a run was given twice; give each run once")
    logs = [RunLog.read(path) for path in paths]
    recipes = [_flat(run_log.recipe.model_dump(mode="json")) for run_log in logs]
    for path, recipe in zip(paths, recipes, strict=True):
        recipe["code of the reward"] = reward_code(RunDirectory(path)) or MISSING
    keys = list(dict.fromkeys(key for recipe in recipes for key in recipe))
    values = {key: [recipe.get(key, MISSING) for recipe in recipes] for key in keys}
    compared: dict[str, Any] = dict(
        runs=[dict(path=str(path)) | summarize(run_log) for path, run_log in zip(paths, logs, strict=True)],
        recipe={key: told for key, told in values.items() if any(value != told[0] for value in told)},
    )
    if page is None:
        return compared
    from pipeline.analysis import drawing

    runs = [{**run, "color": color} for run, color in zip(compared["runs"], itertools.cycle(_COLORS), strict=False)]
    axes: dict[str, list[dict[str, str]]] = {}
    for over, label in AXES.items():
        axes[over] = []
        for metric, title in CURVES:
            lines = [
                (*series(run_log, metric, over), str(run["path"]), str(run["color"]))
                for run_log, run in zip(logs, runs, strict=True)
            ]
            share = metric == "pass_at_1"
            name, floor = f"{metric} over {over}", 0.0 if share else None
            if svg := drawing.curve(name, lines, xlabel=label, percent=share, floor=floor, smooth=False, legend=False):
                axes[over].append(dict(title=title, svg=svg))
    filters = dict(percent=percent, decimal=decimal, duration=duration, count=count)
    text = drawing.page("comparison.html.j2", filters, runs=runs, recipe=compared["recipe"], axes=axes)
    write_atomically(page, text)
    return compared | dict(page=str(page))


def _flat(section: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return `section.key` → value for every leaf of a section. An empty mapping is a leaf."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{above}{key}.")
        else:
            flat[f"{above}{key}"] = value
    return flat


def positions(run_log: RunLog) -> dict[str, dict[int, float]]:
    """Return, for each axis, steps done → position on the axis. Samples are those trained on, up to the first batch of
    unknown size. Seconds count from the first log line and include the pauses between two starts."""
    steps = steps_of(run_log)
    begin = min((float(line["time"]) for line in (*run_log.events, *run_log.metrics)), default=0.0)
    ended = [begin, *(begin if step.ended is None else step.ended for step in steps)]
    return dict(
        steps={done: float(done) for done in range(len(steps) + 1)},
        samples=dict(enumerate(spent_by_version(steps, "samples"))),
        seconds={done: time - begin for done, time in enumerate(itertools.accumulate(ended, max))},
    )


def series(run_log: RunLog, metric: str, over: str) -> tuple[list[float], list[float]]:
    """Return the points of a metric: positions on the axis `over`, and values. Steps without a value are left out."""
    lines: list[tuple[int, Mapping[str, Any]]] = [(int(line["step"]) + 1, line) for line in run_log.metrics]
    if metric == "pass_at_1":
        lines = [(int(event["version"]), event) for event in run_log.evaluations]
    places = positions(run_log)[over]
    known = [
        (places[done], value) for done, line in lines if (value := number(line, metric)) is not None and done in places
    ]
    return [x for x, _ in known], [y for _, y in known]
