"""Verdicts: each claim of the matrix judged by a stated rule, never by hand.

Each claim has in each condition two one-sided hypotheses (see `hypotheses`). Holm's correction runs over all of them on
the page at once. A verdict is `shown` or `refuted` when its adjusted p-value is at most ALPHA, else `undecided`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tests.evidence.forecast import forecast_end, forecast_errors
from tests.evidence.hypotheses import CellKey, Curve, Curves, Tested, evaluate
from tests.evidence.matrix import COMPARING, Better, Claim, Decays, Experiment, Faster, Forecast, Holds, Order
from tests.evidence.results import Arm, Result
from tests.evidence.statistics import ALPHA, Array, Estimate, holm

Answer = Literal["shown", "refuted", "undecided", "not measured"]


@dataclass(frozen=True)
class Verdict:
    """The answer in one condition, with the figures it rests on."""

    condition: str
    answer: Answer
    figures: str


@dataclass(frozen=True)
class Judged:
    """A claim with its verdicts, one a condition."""

    claim: Claim
    verdicts: list[Verdict]


@dataclass(frozen=True, kw_only=True)
class Question:
    """One claim in one condition."""

    experiment: str
    claim: Claim
    condition: str
    tested: Tested | None
    """None where an arm of it was not measured."""


def judge(experiments: Mapping[str, Experiment], results: Mapping[str, Sequence[Result]]) -> dict[str, list[Judged]]:
    """All claims of a page, by experiment."""
    questions = [
        question for name, experiment in experiments.items() for question in _ask(name, experiment, results[name])
    ]
    adjusted = adjusted_p([question.tested for question in questions])
    judged: dict[str, list[Judged]] = {name: [] for name in experiments}
    for question, p in zip(questions, adjusted, strict=True):
        claims = judged[question.experiment]
        if not claims or claims[-1].claim is not question.claim:
            claims.append(Judged(question.claim, []))
        experiment, found = experiments[question.experiment], results[question.experiment]
        claims[-1].verdicts.append(_verdict(question, experiment, found, p))
    return judged


def adjusted_p(tested: Sequence[Tested | None]) -> list[Array]:
    """[2, ...] adjusted p-values of shown and refuted of each question. What was not measured counts as p = 1, so that
    a missing cell does not loosen the rest of the page."""
    if not tested:
        return []
    shape = np.broadcast_shapes(*(np.shape(one.shown) for one in tested if one))
    p = [side for one in tested for side in ((one.shown, one.refuted) if one else (np.ones(shape), np.ones(shape)))]
    adjusted = holm(np.stack([np.broadcast_to(side, shape) for side in p], axis=-1))
    return [np.stack([adjusted[..., 2 * place], adjusted[..., 2 * place + 1]]) for place in range(len(tested))]


def curves_of(experiment: Experiment, results: Sequence[Result], k: int = 1) -> dict[CellKey, Curve]:
    """Every measured cell."""
    found = {}
    for condition in experiment.conditions:
        for name in experiment.arms:
            arm = Arm.of(results, condition, name)
            if arm.results:
                found[condition, name] = arm.run_curve(k)
    return found


def _ask(name: str, experiment: Experiment, results: Sequence[Result]) -> list[Question]:
    found = []
    for claim in experiment.claims:
        curves = curves_of(experiment, results, pass_at(claim))
        for condition in claim.conditions or experiment.conditions:
            others = experiment.others(claim) if isinstance(claim.judge, COMPARING) else []
            tested = None
            if all((condition, arm) in curves for arm in (claim.judge.arm, *others)):
                errors = _errors(experiment, results, claim)
                tested = evaluate(claim.judge, condition, curves, others, experiment.target, errors)
            found.append(Question(experiment=name, claim=claim, condition=condition, tested=tested))
    return found


def _errors(experiment: Experiment, results: Sequence[Result], claim: Claim) -> dict[CellKey, Array]:
    if not isinstance(claim.judge, Forecast):
        return {}
    keys = curves_of(experiment, results)
    return {key: forecast_errors(Arm.of(results, *key), claim.judge.share) for key in keys}


def pass_at(claim: Claim) -> int:
    """The k that a claim is about."""
    return claim.judge.pass_at if isinstance(claim.judge, Better) else 1


def _verdict(question: Question, experiment: Experiment, results: Sequence[Result], p: Array) -> Verdict:
    if question.tested is None:
        return Verdict(question.condition, "not measured", "")
    answer: Answer = "shown" if p[0] <= ALPHA else "refuted" if p[1] <= ALPHA else "undecided"
    arms = [question.claim.judge.arm]
    if isinstance(question.claim.judge, COMPARING):
        arms += experiment.others(question.claim)
    runs = min(len(Arm.of(results, question.condition, arm).results) for arm in arms)
    notes = [_figures(question, experiment, results), f"p {_p(min(p))}"]
    if runs < len(experiment.seeds):
        notes.append(f"{runs} of {len(experiment.seeds)} seeds")
    if runs == 1:
        notes.append("one run: its spread is not known")
    return Verdict(question.condition, answer, "; ".join(notes))


def _figures(question: Question, experiment: Experiment, results: Sequence[Result]) -> str:
    assert question.tested is not None
    claim, condition, estimate = question.claim, question.condition, question.tested.estimate
    curves = curves_of(experiment, results, pass_at(claim))
    ours = curves[condition, claim.judge.arm]
    match claim.judge:
        case Better(pass_at=k):
            other = max(experiment.others(claim), key=lambda arm: curves[condition, arm].end.mean())
            end = curves[condition, other].end.mean()
            name = f" ({experiment.arms[other].title})" if claim.judge.than is None else ""
            return f"pass@{k} {show(ours.end.mean())} against {show(end)}{name}: {with_interval(estimate, sign=True)}"
        case Decays() | Holds():
            return _fall_figures(curves, (condition, claim.judge.arm), estimate)
        case Faster(than=than, cost=cost):
            return _price_figures(ours, curves[condition, than], cost, experiment.target or 1.0, estimate)
        case Order(than=than, share=share):
            gap, version = ours.values.mean(axis=0) - curves[condition, than].values.mean(axis=0), ours.at(share)
            early = gap[ours.versions.index(version)]
            late = with_interval(estimate, sign=True)
            return f"pass@1 differs by {early:+.3f} at version {version} and by {late} at the end"
        case Forecast(share=share):
            arm = Arm.of(results, condition, claim.judge.arm)
            told, end = forecast_end(arm, share), ours.end.mean()
            return (
                f"from the first {told.points} evaluations of each run {show(end + estimate.value)}, measured "
                f"{show(end)}: error {with_interval(estimate, sign=True)}; A of their mean {told.asymptote}"
            )


def _fall_figures(curves: Curves, key: CellKey, fall: Estimate) -> str:
    curve = curves[key]
    means = curve.values.mean(axis=0)
    top = int(means[:-1].argmax())
    return (
        f"{show(means[top])} at version {curve.versions[top]}, {show(means[-1])} at {curve.versions[-1]}: falls by "
        f"{with_interval(fall)}"
    )


def _price_figures(ours: Curve, theirs: Curve, cost: str, target: float, ratio: Estimate) -> str:
    """Costs at the first published, evaluated version that reaches the target, mean over the runs."""
    unit = dict(samples="samples", seconds="s")[cost]
    prices = [float(curve.bracket(cost, target)[1].mean()) for curve in (ours, theirs)]
    said = [f"at {quantity(price)} {unit}" if price < math.inf else "not in every run" for price in prices]
    figures = f"pass@1 {target:g} is first seen {said[0]}, the other's {said[1]}"
    if not np.isfinite(ratio.value):
        return figures
    low, high = (math.exp(bound) for bound in ratio.interval())
    bounds = f" ({quantity(low)} to {quantity(high)})" if ratio.error > 0 else " (runs do not differ: no interval)"
    return f"{figures}: {quantity(math.exp(ratio.value))} times as fast{bounds}"


def _p(value: float) -> str:
    return f"{value:.2g}" if value >= 0.001 else "< 0.001"


def show(share: float) -> str:
    """A pass rate."""
    return f"{share:.3f}"


def with_interval(estimate: Estimate, *, sign: bool = False, share: bool = False) -> str:
    """`0.123 (0.100, 0.150)`, the interval of this comparison alone; without it where no spread was measured. That of
    a share, which lies between 0 and 1, is cut there."""
    form = "{:+.3f}" if sign else "{:.3f}"
    interval = np.clip(estimate.interval(), *((0.0, 1.0) if share else (-math.inf, math.inf)))
    value, low, high = (form.format(float(number) + 0.0) for number in (estimate.value, *interval))
    return value if math.isinf(estimate.interval()[1]) else f"{value} ({low}, {high})"


def quantity(value: float) -> str:
    """A count, seconds or a ratio."""
    if math.isinf(value):
        return "∞"
    return f"{value:,.0f}".replace(",", " ") if value >= 100 else f"{value:.3g}"
