"""docs/evidence.md: verdicts first, then each experiment with its tables and its picture. Nothing in it is typed by
hand: sentences come from the matrix, numbers from the results, answers from the rules of `claims`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from pipeline.data.run_directory import write_atomically
from tests.evidence import statistics
from tests.evidence.claims import DECAY, FORECAST_MARGIN, Judged, judge, quantity, show, with_interval
from tests.evidence.matrix import Column, Experiment, Matrix
from tests.evidence.plots import draw
from tests.evidence.results import Arm, Result, load

EMPHASISED = ("shown", "refuted")

HEAD = """\
# Evidence: what the methods do on the real stack

{note}Written by `{command}` from `tests/evidence/matrix.yaml`: {cells} runs of `evenkeel train`, each with a real
SGLang engine, a real Megatron-Core learner and a Qwen3 of about half a million parameters on a generated task. Small
models show mechanisms, not sizes of effects: read an answer below as “here”, never as “at 32B”.

**How numbers are made.** pass@k is held-out: prompts that no run trains on, sampled at T = 1 from the engine that
serves the policy, in its precision; another seed has other prompts. Values are means over seeds and prompts. Intervals
are 95 %, from a bootstrap over seeds and, within a seed, over prompts; comparisons draw the same seeds and prompts for
both sides. Two or three seeds say little about other seeds. “Best” is chosen by looking at all evaluations and
flatters. A run that diverged scores 0 from then on.

**How claims are judged.** *Decays*: the fall from the best evaluation to the last is at least {decay:.2f} and its
interval excludes 0; *holds*: that interval lies below {decay:.2f}; each refutes the other. *Better*, *faster*: the
interval of the difference lies above 0, of the ratio above 1; refuted when below. *Forecast*: off by at most
{margin:.2f}; refuted when off by more and outside the forecast's interval. Anything else is undecided.
"""


def write_page(matrix: Matrix, page: Path, *, quick: bool) -> None:
    """Write the page and its pictures from the results beside it."""
    folder = page.with_suffix("")
    results = {name: load(folder / f"{name}.json") for name in matrix.experiments}
    judged = {name: judge(experiment, results[name]) for name, experiment in matrix.experiments.items()}
    lines = [*_head(matrix, quick), *_verdicts(matrix, judged), *_consequences(judged)]
    for name, experiment in matrix.experiments.items():
        picture = folder / f"{name}.png"
        lines += _section(matrix, name, experiment, results[name])
        if results[name]:
            draw(experiment, results[name], picture)
            lines += ["", f"![{experiment.title}]({folder.name}/{picture.name})", ""]
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(page, "\n".join(lines).rstrip() + "\n")


def _head(matrix: Matrix, quick: bool) -> list[str]:
    cells = sum(len(e.seeds) * len(e.conditions) * len(e.arms) for e in matrix.experiments.values())
    note = "**The quick version: too few steps and seeds to conclude from.** " if quick else ""
    command = "make evidence QUICK=1" if quick else "make evidence"
    return HEAD.format(note=note, command=command, cells=cells, decay=DECAY, margin=FORECAST_MARGIN).split("\n")


def _verdicts(matrix: Matrix, judged: dict[str, list[Judged]]) -> list[str]:
    lines = ["## Verdicts", "", "| claim | source | where | answer | figures |", "|---|---|---|---|---|"]
    for name, claims in judged.items():
        conditions = matrix.experiments[name].conditions
        for one in claims:
            for place, verdict in enumerate(one.verdicts):
                claim = (one.claim.text, one.claim.source) if place == 0 else ("", "")
                where = conditions[verdict.condition].title
                lines.append(
                    _row(
                        [
                            *claim,
                            where,
                            f"**{verdict.answer}**" if verdict.answer in EMPHASISED else verdict.answer,
                            verdict.figures,
                        ]
                    )
                )
    return [*lines, ""]


def _consequences(judged: dict[str, list[Judged]]) -> list[str]:
    said = [one.consequence for claims in judged.values() for one in claims if one.consequence]
    return ["## What follows for the recipes", "", *(f"- {line}" for line in dict.fromkeys(said)), ""] if said else []


def _section(matrix: Matrix, name: str, experiment: Experiment, results: Sequence[Result]) -> list[str]:
    model = matrix.models[experiment.model]
    lines = [
        f"## {experiment.title}",
        "",
        experiment.text,
        "",
        f"Model `{experiment.model}` ({model.steps} × {model.batch_size} demonstrations), recipe `{model.recipe}`; "
        f"seeds {', '.join(map(str, experiment.seeds))}; curves in `{name}.json`.",
    ]
    for condition, variant in experiment.conditions.items():
        lines += ["", f"### {variant.title[0].upper()}{variant.title[1:]}", "", *_table(experiment, results, condition)]
    return [*lines, *_failures(results)]


def _table(experiment: Experiment, results: Sequence[Result], condition: str) -> list[str]:
    header = ["arm"]
    for k in experiment.pass_at:
        header += [f"pass@{k} at start", "best (version)", f"pass@{k} at the end"]
    if experiment.target is not None:
        header += [f"samples to {experiment.target:g}", f"seconds to {experiment.target:g}", "seconds of all steps"]
    header += [column.title for column in experiment.columns]
    header += ["seeds"]
    lines = [_row(header), "|---" * len(header) + "|"]
    for name, variant in experiment.arms.items():
        found = [result for result in results if (result.condition, result.arm) == (condition, name)]
        arm = Arm.of(found, condition, name)
        if not arm.results:
            lines.append(_row([variant.title, *["–"] * (len(header) - 2), _standing(found, len(experiment.seeds))]))
            continue
        cells = [variant.title]
        for k in experiment.pass_at:
            cells += _scores(arm, k)
        if experiment.target is not None:
            cells += [_price(arm, experiment.target, "samples"), _price(arm, experiment.target, "seconds")]
            cells.append(quantity(float(arm.costs("seconds")[-1])))
        cells += [_number(arm, column) for column in experiment.columns]
        lines.append(_row([*cells, _standing(found, len(experiment.seeds))]))
    return lines


def _scores(arm: Arm, k: int) -> list[str]:
    curve = arm.curve(k)
    top = statistics.peak(curve)
    return [
        show(statistics.at(curve, 0).value),
        f"{show(statistics.at(curve, top).value)} ({arm.versions[top]})",
        with_interval(statistics.at(curve, -1)),
    ]


def _price(arm: Arm, target: float, cost: Literal["samples", "seconds"]) -> str:
    price = statistics.crossing(arm.curve(), arm.costs(cost), target)
    value, low, high = (
        quantity(number) if number < math.inf else "never" for number in (price.value, price.low, price.high)
    )
    return f"{value} ({low} to {high})"


def _number(arm: Arm, column: Column) -> str:
    seeds = [values for values in arm.metric(column.metric) if values]
    if not seeds:
        return "–"
    last_tenth = [values[-max(1, len(values) // 10) :] for values in seeds]
    taken = dict(
        first=[values[0] for values in seeds],
        last=[float(np.mean(values)) for values in last_tenth],
        min=[min(values) for values in seeds],
        max=[max(values) for values in seeds],
    )[column.take]
    return f"{np.mean(taken):.4g}"


def _standing(results: Sequence[Result], wanted: int) -> str:
    """How many seeds, and what happened to those that did not finish."""
    said = [f"{len(results)} of {wanted}" if len(results) < wanted else f"{wanted}"]
    for one in results:
        if one.state == "diverged":
            said.append(f"seed {one.seed} diverged at step {one.steps}")
        elif one.state != "finished":
            said.append(f"seed {one.seed} {one.state} at step {one.steps} of {one.steps_planned}")
    return "; ".join(said)


def _failures(results: Iterable[Result]) -> list[str]:
    lines = [
        f"- {one.condition}, {one.arm}, seed {one.seed}: {one.state} at step {one.steps}: {one.reason}"
        for one in results
        if one.state in ("diverged", "failed")
    ]
    return ["", *lines] if lines else []


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
