"""docs/evidence.md: verdicts first, then each experiment with its tables and its picture. Nothing in it is typed by
hand: sentences come from the matrix, numbers from the results, answers from the rules of `claims`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from pipeline.data.files import write_atomically
from tests.evidence.claims import Judged, curves_of, judge, quantity, show, with_interval
from tests.evidence.equal_arms import NUM_PAGES, false_page_rate, run_to_run_sd
from tests.evidence.hypotheses import DECAY, FORECAST_MARGIN, Curve
from tests.evidence.matrix import Column, Experiment, Matrix
from tests.evidence.plots import draw
from tests.evidence.practice import practice
from tests.evidence.results import Arm, Result, load
from tests.evidence.statistics import ALPHA, POWER, Spread, runs_needed, visible_difference

EMPHASISED = ("shown", "refuted")

HEAD = """\
# Evidence: what the methods do on the real stack

{note}**What to do**, as far as it was measured at toy size (held-out pass@1; models of half a million parameters show
mechanisms, not sizes of effects):

{practice}

**{undecided} of {verdicts} answers to the claims below are “undecided”:** runs of one recipe differ from each other far
more than prompts do, and two or three seeds say little about that. Undecided means neither yes nor no; it changes no
recipe, and no recipe is supported by it.

## What was measured, and what it could have shown

Written by `{command}` from `tests/evidence/matrix.yaml`: {cells} runs of `evenkeel train`, each with a real
SGLang engine, a real Megatron-Core learner and a Qwen3 of about half a million parameters on a generated task. Read an
answer below as “here”, never as “at 32B”. What the seeds could have shown, and how many would show more:

{power}

*Visible*: the true difference of two arms at the end that is seen with a chance of {power_share:.0%} at the level of
the first step of Holm's correction. *Seeds for*: how many each arm needs to see such a difference.

**How numbers are made.** pass@k is held-out: prompts that no run trains on, sampled at T = 1 from the engine that
serves the policy, in its precision; another seed has other prompts. The run is the unit: values are means over runs of
means over prompts, and intervals are 95 % t intervals, each for itself, with the run-to-run variance pooled within the
cells of one experiment. It is not pooled over the page: experiments scatter unalike, as the table above says, and a
common variance would flatter those that scatter most. “Best” is chosen by looking at all evaluations and flatters. A
run that diverged scores 0 from then on. Time to a level counts only at published, evaluated versions: no line is drawn
between evaluations.

**How claims are judged.** Every verdict rejects a one-sided hypothesis; each claim has two of them, one against
“shown” and one against “refuted”. Holm's correction (1979) over all {hypotheses} on this page keeps the chance of any
false verdict at or below {alpha:.0%}, as long as the arms of an experiment scatter alike.
*Ends above*: the difference at the end; against every other arm, each of them
has to be beaten, so that a weak one recommends nothing. *Decays*: an evaluation lies above the last, by at least
{decay:.2f}, with the p-value multiplied by their number. *Holds*: none lies {decay:.2f} above the last, and the end
lies above the start. *Less time, no more samples*: the logarithm of the costs, where each comparison takes the end of
the bracket between two evaluations that speaks against it. *Forecast*: the error of each run, {margin:.2f} allowed.
*Order*: the differences at the share and at the end lie both on one side of zero, each by a test of its own.

**How often that is wrong.** In {pages:,} simulated pages with these arms, seeds and measured spreads, but equal arms,
{steady:.1%} have any false verdict, and {falling:.1%} where all fall by {decay:.2f} at the end; forecasts are not
simulated. **The weak points:** a pooled variance assumes that arms of one experiment scatter alike. If each cell truly
had the spread that its own few runs show, from {least:.2f} to {most:.2f}, {steady_own:.0%} of the pages would have a
false verdict ({falling_own:.0%} where all fall): so few runs a cell can neither show nor exclude that. And runs of one
seed share their prompts, which widens the intervals of differences and narrows those of levels.
"""


def write_page(matrix: Matrix, page: Path, *, quick: bool) -> None:
    """Write the page and its pictures from the results beside it."""
    folder = page.with_suffix("")
    results = {name: load(folder / f"{name}.json") for name in matrix.experiments}
    judged = judge(matrix.experiments, results)
    lines = [
        *_head(matrix, results, judged, practice(folder), quick),
        *_verdicts(matrix, judged),
        *_consequences(judged),
    ]
    for name, experiment in matrix.experiments.items():
        picture = folder / f"{name}.png"
        lines += _section(matrix, name, experiment, results[name])
        if results[name]:
            draw(experiment, results[name], picture)
            lines += ["", f"![{experiment.title}]({folder.name}/{picture.name})", ""]
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(page, "\n".join(lines).rstrip() + "\n")


def _head(
    matrix: Matrix,
    results: Mapping[str, Sequence[Result]],
    judged: Mapping[str, Sequence[Judged]],
    advice: Sequence[str],
    quick: bool,
) -> list[str]:
    declared = sum(len(e.seeds) * len(e.conditions) * len(e.arms) for e in matrix.experiments.values())
    measured = sum(map(len, results.values()))
    answers = [verdict.answer for claims in judged.values() for one in claims for verdict in one.verdicts]
    steady, falling, steady_own, falling_own = (
        false_page_rate(matrix.experiments, results, falls=falls, scatter=scatter)
        for scatter in ("alike", "own")
        for falls in (False, True)
    )
    scatters = _own_scatters(matrix, results)
    return HEAD.format(
        note="**The quick version: too few steps and seeds to conclude from.** " if quick else "",
        command="make evidence QUICK=1" if quick else "make evidence",
        practice="\n".join(advice) or "Nothing yet: what it rests on has not been measured.",
        cells=str(declared) if measured == declared else f"{measured} of {declared} declared",
        undecided=sum(answer == "undecided" for answer in answers),
        verdicts=len(answers),
        power="\n".join(_power(matrix, results, num_hypotheses=2 * len(answers))),
        power_share=POWER,
        hypotheses=2 * len(answers),
        alpha=ALPHA,
        decay=DECAY,
        margin=FORECAST_MARGIN,
        pages=NUM_PAGES,
        steady=steady,
        falling=falling,
        steady_own=steady_own,
        falling_own=falling_own,
        least=min(scatters, default=0.0),
        most=max(scatters, default=0.0),
    ).split("\n")


def _own_scatters(matrix: Matrix, results: Mapping[str, Sequence[Result]]) -> list[float]:
    """The run-to-run standard deviation of each cell that has two runs."""
    curves = [curve for name, one in matrix.experiments.items() for curve in curves_of(one, results[name]).values()]
    return [run_to_run_sd([curve]) for curve in curves if curve.end.shape[-1] > 1]


def _power(matrix: Matrix, results: Mapping[str, Sequence[Result]], num_hypotheses: int) -> list[str]:
    """What each experiment can see of a difference at the end."""
    wanted = (0.05, 0.10, 0.20)
    header = ["experiment", "run-to-run SD", "degrees of freedom", "seeds", "visible"]
    lines = [_row([*header, *(f"seeds for {one:.2f}" for one in wanted)]), "|---" * (len(header) + len(wanted)) + "|"]
    alpha = ALPHA / max(num_hypotheses, 1)
    for name, experiment in matrix.experiments.items():
        curves = curves_of(experiment, results[name])
        spread = Spread.of(curve.end for curve in curves.values())
        row = [experiment.title, "not known", str(spread.df), str(len(experiment.seeds))]
        if spread.df < 1 or spread.sd <= 0.0:
            lines.append(_row([*row, *["–"] * (len(wanted) + 1)]))
            continue
        sd, runs = float(spread.sd), min(curve.end.shape[-1] for curve in curves.values())
        row[1] = f"{sd:.3f}"
        visible = visible_difference(sd, runs, spread.df, alpha)
        row.append(f"{visible:.2f}" if visible < 1.0 else "none")
        lines.append(_row([*row, *(str(runs_needed(one, sd, len(curves), alpha)) for one in wanted)]))
    return lines


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
    lines = [f"- {line}" for line in dict.fromkeys(said)] or ["Nothing: no comparison with every other arm is decided."]
    return ["## What follows for the recipes", "", *lines, ""]


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
        cells += [_number(arm, column) for column in experiment.columns]
        lines.append(_row([*cells, _standing(found, len(experiment.seeds))]))
    return lines


def _scores(curve: Curve, spread: Spread) -> list[str]:
    means = curve.values.mean(axis=0)
    top = int(len(means) - 1 - means[::-1].argmax())  # the later of equals
    return [
        show(means[0]),
        f"{show(means[top])} ({curve.versions[top]})",
        with_interval(spread.mean(curve.end), share=True),
    ]


def _price(arm: Arm, target: float, cost: Literal["samples", "seconds"]) -> str:
    """At the first published, evaluated version that reaches the target, mean over the runs that do."""
    prices = arm.run_curve().bracket(cost, target)[1]
    reached = prices[np.isfinite(prices)]
    if not len(reached):
        return "never"
    return quantity(float(reached.mean())) + (
        f" ({len(reached)} of {len(prices)})" if len(reached) < len(prices) else ""
    )


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
