"""docs/evidence/claims.md: verdicts first, then the tables of each experiment. Sentences come from the matrix, numbers
from the results, answers from the rules of `claims`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from pipeline.data.files import write_atomically
from tests.evidence.claims import Judged, curves_of, judge, quantity, show, with_interval
from tests.evidence.hypotheses import Curve
from tests.evidence.matrix import Experiment, Matrix
from tests.evidence.results import Arm, Result
from tests.evidence.statistics import ALPHA, Spread

EMPHASISED = ("shown", "refuted")

HEAD = """\
# The papers' claims at toy size

{note}Written by `{command}` from `tests/evidence/matrix.yaml`: {cells} runs of `evenkeel train`, each with a real
SGLang engine, a real Megatron-Core learner and a Qwen3 of about half a million parameters on a generated task. Read an
answer as “here”, never as “at 32B”. **{undecided} of {verdicts} answers are “undecided”**: runs of one recipe differ
from each other far more than prompts do, and two or three seeds say little about that.

pass@k is held-out, sampled at T = 1 from the engine that serves the policy. The run is the unit: intervals are 95 % t
intervals with the run-to-run variance pooled within an experiment. A run that diverged scores 0 from then on. Time to
a level counts at published, evaluated versions. Every verdict rejects a one-sided hypothesis; Holm's correction over
all {hypotheses} (p is adjusted by it) keeps the chance of any false verdict at or below {alpha:.0%} if the arms of an
experiment scatter alike. The rules are in `tests/evidence/hypotheses.py`.
"""


def write_page(matrix: Matrix, results: Mapping[str, Sequence[Result]], page: Path, *, quick: bool) -> None:
    """Write the page of the claims."""
    judged = judge(matrix.experiments, results)
    lines = [*_head(matrix, results, judged, quick), *_verdicts(matrix, judged)]
    for name, experiment in matrix.experiments.items():
        lines += [*_section(matrix, name, experiment, results[name]), ""]
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(page, "\n".join(lines).rstrip() + "\n")


def _head(
    matrix: Matrix, results: Mapping[str, Sequence[Result]], judged: Mapping[str, Sequence[Judged]], quick: bool
) -> list[str]:
    declared = sum(len(e.seeds) * len(e.conditions) * len(e.arms) for e in matrix.experiments.values())
    measured = sum(map(len, results.values()))
    answers = [verdict.answer for claims in judged.values() for one in claims for verdict in one.verdicts]
    return HEAD.format(
        note="**The quick version: too few steps and seeds to conclude from.** " if quick else "",
        command="make evidence QUICK=1" if quick else "make evidence",
        cells=str(declared) if measured == declared else f"{measured} of {declared} declared",
        undecided=sum(answer == "undecided" for answer in answers),
        verdicts=len(answers),
        hypotheses=2 * len(answers),
        alpha=ALPHA,
    ).split("\n")


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


def _section(matrix: Matrix, name: str, experiment: Experiment, results: Sequence[Result]) -> list[str]:
    model = matrix.models[experiment.model]
    lines = [
        f"## {experiment.title}",
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
        header += [f"pass@{k} at start", f"pass@{k} at the end"]
    if experiment.target is not None:
        header += [f"samples to {experiment.target:g}", f"seconds to {experiment.target:g}", "seconds of all steps"]
    header += ["seeds"]
    lines = [_row(header), "|---" * len(header) + "|"]
    spreads = {k: Spread.of(c.end for c in curves_of(experiment, results, k).values()) for k in experiment.pass_at}
    for name, variant in experiment.arms.items():
        found = [result for result in results if (result.condition, result.arm) == (condition, name)]
        arm = Arm.of(found, condition, name)
        if not arm.results:
            lines.append(_row([variant.title, *["–"] * (len(header) - 2), _standing(found, len(experiment.seeds))]))
            continue
        cells = [variant.title]
        for k in experiment.pass_at:
            cells += _scores(arm.run_curve(k), spreads[k])
        if experiment.target is not None:
            cells += [_price(arm, experiment.target, "samples"), _price(arm, experiment.target, "seconds")]
            cells.append(quantity(float(arm.costs("seconds")[-1])))
        lines.append(_row([*cells, _standing(found, len(experiment.seeds))]))
    return lines


def _scores(curve: Curve, spread: Spread) -> list[str]:
    return [show(curve.values.mean(axis=0)[0]), with_interval(spread.mean(curve.end), share=True)]


def _price(arm: Arm, target: float, cost: Literal["samples", "seconds"]) -> str:
    """At the first published, evaluated version that reaches the target, mean over the runs that do."""
    prices = arm.run_curve().bracket(cost, target)[1]
    reached = prices[np.isfinite(prices)]
    if not len(reached):
        return "never"
    return quantity(float(reached.mean())) + (
        f" ({len(reached)} of {len(prices)})" if len(reached) < len(prices) else ""
    )


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
