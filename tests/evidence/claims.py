"""Verdicts: each claim of the matrix judged by a stated rule from the intervals, never by hand.

    decays    shown: the fall from the best evaluation to the last is at least DECAY and its interval excludes 0
              refuted: its interval lies below DECAY
    holds     the other way round
    better    shown: the interval of the difference at the last evaluation lies above 0; refuted: below 0
    faster    shown: the interval of the ratio of costs lies above 1; refuted: below 1
    forecast  shown: forecast and measurement differ by at most FORECAST_MARGIN
              refuted: by more, and the measurement lies outside the forecast's interval

Everything else is undecided. A verdict is the rule's answer, and carries the figures that it rests on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tests.evidence import statistics
from tests.evidence.forecast import forecast_end
from tests.evidence.matrix import Better, Claim, Decays, Experiment, Faster, Forecast, Holds
from tests.evidence.results import Arm, Result
from tests.evidence.statistics import Estimate

DECAY = 0.10
FORECAST_MARGIN = 0.05

Answer = Literal["shown", "refuted", "undecided", "not measured"]

OPPOSITE: dict[Answer, Answer] = dict(shown="refuted", refuted="shown")


@dataclass(frozen=True)
class Verdict:
    """The answer in one condition, with the figures it rests on."""

    condition: str
    answer: Answer
    figures: str
    complete: bool = True
    """Whether every seed of the matrix was measured."""


@dataclass(frozen=True)
class Judged:
    """A claim with its verdicts, one a condition."""

    claim: Claim
    verdicts: list[Verdict]

    @property
    def consequence(self) -> str:
        """What follows for a recipe; empty while a cell is missing."""
        answers = {verdict.answer for verdict in self.verdicts}
        if not all(verdict.complete for verdict in self.verdicts):
            return ""
        return self.claim.when_shown if answers == {"shown"} else self.claim.otherwise


def judge(experiment: Experiment, results: Sequence[Result]) -> list[Judged]:
    """All claims of an experiment, from the cells that came to their end."""
    settled = [result for result in results if result.state in ("finished", "diverged")]
    return [
        Judged(
            claim,
            [
                _verdict(claim, experiment, settled, condition)
                for condition in claim.conditions or experiment.conditions
            ],
        )
        for claim in experiment.claims
    ]


def _verdict(claim: Claim, experiment: Experiment, results: Sequence[Result], condition: str) -> Verdict:
    arms = {name: Arm.of(results, condition, name) for name in claim.named_arms}
    seeds = set.intersection(*(set(arm.seeds) for arm in arms.values()))
    if not seeds:
        return Verdict(condition, "not measured", "", complete=False)
    arms = {name: Arm.of(results, condition, name, seeds) for name in arms}
    match claim.judge:
        case Decays(arm=arm):
            answer, figures = _decays(arms[arm])
        case Holds(arm=arm):
            answer, figures = _decays(arms[arm])
            answer = OPPOSITE.get(answer, answer)
        case Better(arm=arm, than=than, pass_at=k):
            answer, figures = _better(arms[arm], arms[than], k)
        case Faster(arm=arm, than=than, cost=cost):
            answer, figures = _faster(arms[arm], arms[than], cost, experiment.target or 1.0)
        case Forecast(arm=arm, share=share):
            answer, figures = _forecast(arms[arm], share)
    missing = len(experiment.seeds) - len(seeds)
    note = f"; {len(seeds)} of {len(experiment.seeds)} seeds" if missing else ""
    return Verdict(condition, answer, figures + note, complete=not missing)


def _decays(arm: Arm) -> tuple[Answer, str]:
    curve = arm.curve()
    fall, top = statistics.fall(curve), statistics.peak(curve)
    best, last = (show(statistics.at(curve, place).value) for place in (top, -1))
    figures = f"best at the end, {last} at version {arm.versions[-1]}"
    if fall.value > 0.0:
        figures = f"{best} at version {arm.versions[top]}, {last} at {arm.versions[-1]}: falls by {with_interval(fall)}"
    if fall.value >= DECAY and fall.low > 0.0:
        return "shown", figures
    return ("refuted" if fall.high < DECAY else "undecided"), figures


def _better(ours: Arm, theirs: Arm, k: int) -> tuple[Answer, str]:
    gain = statistics.difference(ours.curve(k), theirs.curve(k))
    figures = (
        f"pass@{k} {show(statistics.at(ours.curve(k), -1).value)} against "
        f"{show(statistics.at(theirs.curve(k), -1).value)}: {with_interval(gain, sign=True)}"
    )
    return _by_interval(gain, 0.0), figures


def _faster(ours: Arm, theirs: Arm, cost: Literal["samples", "seconds"], target: float) -> tuple[Answer, str]:
    our_costs, their_costs = ours.costs(cost), theirs.costs(cost)
    our_price = statistics.crossing(ours.curve(), our_costs, target)
    their_price = statistics.crossing(theirs.curve(), their_costs, target)
    ratio = statistics.crossing_ratio(ours.curve(), our_costs, theirs.curve(), their_costs, target)
    unit = dict(samples="samples", seconds="s")[cost]
    prices = [f"after {quantity(p.value)} {unit}" if p.value < math.inf else "never" for p in (our_price, their_price)]
    figures = (
        f"reaches pass@1 {target:g} {prices[0]}, the other {prices[1]}: {quantity(ratio.value)} times as fast "
        f"({quantity(ratio.low)} to {quantity(ratio.high)})"
    )
    return _by_interval(ratio, 1.0), figures


def _forecast(arm: Arm, share: float) -> tuple[Answer, str]:
    told = forecast_end(arm, share)
    end = statistics.at(arm.curve(), -1)
    error = told.value - end.value
    low, high = ("" if math.isnan(bound) else show(bound) for bound in (told.low, told.high))
    interval = f" ({low} to {high})" if low and high else ""
    figures = (
        f"from the first {told.points} evaluations {show(told.value)}{interval}, measured {with_interval(end)}: "
        f"error {error:+.3f}; A {told.asymptote}"
    )
    if abs(error) <= FORECAST_MARGIN:
        return "shown", figures
    return ("refuted" if end.value < told.low or end.value > told.high else "undecided"), figures


def _by_interval(estimate: Estimate, nothing: float) -> Answer:
    if estimate.low > nothing:
        return "shown"
    return "refuted" if estimate.high < nothing else "undecided"


def show(share: float) -> str:
    """A pass rate."""
    return f"{share:.3f}"


def with_interval(estimate: Estimate, *, sign: bool = False) -> str:
    """`0.123 (0.100 to 0.150)`."""
    form = "{:+.3f}" if sign else "{:.3f}"
    value, low, high = (form.format(number + 0.0) for number in (estimate.value, estimate.low, estimate.high))
    return f"{value} ({low} to {high})"


def quantity(value: float) -> str:
    """A count, seconds or a ratio."""
    if math.isinf(value):
        return "∞"
    return f"{value:,.0f}".replace(",", " ") if value >= 100 else f"{value:.3g}"
