"""The two one-sided hypotheses of each claim, and their p-values.

A claim is shown by rejecting one hypothesis and refuted by rejecting another; only false rejections are false verdicts.

    better    shown against "some other arm ends at least as high"; refuted against "none ends higher"
    decays    shown against "no evaluation lies above the last"; refuted against "some lies DECAY above the last"
    holds     shown against "some evaluation lies DECAY above the last, or the end is not above the start";
              refuted as a decay is shown
    faster    shown against "ours costs at least as much", refuted against "ours costs at most as much"
    order     shown against "the difference at the share and that at the end do not both lie on one side of zero",
              refuted against "they do not lie on opposite sides"
    forecast  shown against "the error is at least FORECAST_MARGIN", refuted against "it is at most that"

"Every" takes the largest p-value of its parts (Berger, intersection-union tests, 1982), "some" the smallest times their
number (Bonferroni), so that choosing the best evaluation or the strongest arm by looking flatters nobody.

Cost is known as a bracket: the last evaluation below the target, the first at it. Only published, evaluated versions
are looked at, and each comparison takes the end of the bracket that speaks against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tests.evidence.matrix import Better, Decays, Faster, Forecast, Holds, Order
from tests.evidence.statistics import Array, Estimate, Spread

DECAY = 0.10
FORECAST_MARGIN = 0.05

CellKey = tuple[str, str]
"""Condition and arm."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The runs of one cell."""

    versions: tuple[int, ...]
    values: Array
    """[..., runs, evaluations] pass@k, the mean over prompts."""
    samples: Array
    """[runs, evaluations] samples trained on up to each version."""
    seconds: Array
    """[runs, evaluations] seconds of training up to the publish of each version; infinite after a divergence."""

    @property
    def end(self) -> Array:
        """[..., runs]."""
        return self.values[..., -1]

    def at(self, share: float) -> int:
        """The last version evaluated within the first `share` of the run."""
        return max(version for version in self.versions if version <= share * self.versions[-1])

    def rise(self, version: int) -> Array:
        """[..., runs] how far the end lies above `version`."""
        return self.end - self.values[..., self.versions.index(version)]

    def bracket(self, cost: str, target: float) -> tuple[Array, Array]:
        """[..., runs] cost of the last evaluation before the target is reached and of the first that reaches it; what
        is never reached has the cost of the whole run, up to where it diverged, and infinity."""
        costs = np.broadcast_to(self.samples if cost == "samples" else self.seconds, self.values.shape)
        known = np.maximum.accumulate(np.where(np.isfinite(costs), costs, 0.0), axis=-1)
        reached = self.values >= target
        first = np.where(reached.any(axis=-1), reached.argmax(axis=-1), len(self.versions))[..., None]
        below = np.concatenate([known[..., :1] * 0.0, known], axis=-1)
        at = np.concatenate([costs, np.full((*costs.shape[:-1], 1), np.inf)], axis=-1)
        return np.take_along_axis(below, first, axis=-1)[..., 0], np.take_along_axis(at, first, axis=-1)[..., 0]


Curves = Mapping[CellKey, Curve]
"""Every measured cell of an experiment."""


@dataclass(frozen=True)
class Tested:
    """p-values of the hypotheses that a verdict rejects, and the estimate that the page prints."""

    shown: Array
    refuted: Array
    estimate: Estimate


def better(curves: Curves, ours: CellKey, others: list[CellKey]) -> Tested:
    """`ours` ends above each of `others`; the estimate is against the one that ends highest."""
    spread = Spread.of(curve.end for curve in curves.values())
    gains = [spread.difference(curves[ours].end, curves[other].end) for other in others]
    shown = np.max([gain.p_above(0.0) for gain in gains], axis=0)
    refuted = _some([gain.p_below(0.0) for gain in gains])
    return Tested(shown, refuted, _least(gains))


def decays(curves: Curves, key: CellKey) -> Tested:
    """The end lies below an earlier evaluation; the estimate is the largest fall, negative where the end is best."""
    falls = [_fall(curves, key, version) for version in curves[key].versions[:-1]]
    largest = _least([Estimate(-fall.value, fall.error, fall.df) for fall in falls])
    fall = Estimate(-largest.value, largest.error, largest.df)
    shown = np.where(fall.value >= DECAY, _some([one.p_above(0.0) for one in falls]), 1.0)
    refuted = np.max([one.p_below(DECAY) for one in falls], axis=0)
    return Tested(shown, refuted, fall)


def holds(curves: Curves, key: CellKey) -> Tested:
    """No evaluation lies DECAY above the end, and the end lies above the start."""
    decay, learned = decays(curves, key), rise(curves, key)
    return Tested(np.maximum(decay.refuted, learned.p_above(0.0)), decay.shown, decay.estimate)


def rise(curves: Curves, key: CellKey) -> Estimate:
    """From the first evaluation to the last."""
    fall = _fall(curves, key, curves[key].versions[0])
    return Estimate(-fall.value, fall.error, fall.df)


def faster(curves: Curves, ours: CellKey, theirs: CellKey, cost: str, target: float) -> Tested:
    """`ours` reaches the target at a lower cost; the estimate is the logarithm of their cost over ours, first
    evaluations that reach it on both sides. Costs are compared as logarithms."""
    with np.errstate(divide="ignore", invalid="ignore"):
        brackets = {key: tuple(np.log(end) for end in curve.bracket(cost, target)) for key, curve in curves.items()}
        # A run that never gets there says nothing of the spread: its cell adds none, and its degrees of freedom go.
        cells = [reached for _, reached in brackets.values() if np.isfinite(reached).all()]
        spread = Spread.of(cells) if cells else Spread(np.asarray(np.nan), 0)
        (our_low, our_high), (their_low, their_high) = brackets[ours], brackets[theirs]
        shown = spread.difference(their_low, our_high).p_above(0.0)
        refuted = spread.difference(their_high, our_low).p_below(0.0)
        estimate = spread.difference(their_high, our_high)
    return Tested(np.nan_to_num(shown, nan=1.0), np.nan_to_num(refuted, nan=1.0), estimate)


def order(curves: Curves, ours: CellKey, theirs: CellKey, share: float) -> Tested:
    """Who is ahead at `share` of the run is ahead at its end; the estimate is the difference at the end. An arm all of
    whose runs diverged may have no evaluation there: then both are read at the last one before that both have."""
    both = set(curves[ours].versions) & set(curves[theirs].versions)
    version = max(version for version in both if version <= curves[ours].at(share))
    known = [curve for curve in curves.values() if version in curve.versions]
    spread = Spread.of(curve.values[..., curve.versions.index(version)] for curve in known)
    our_early, their_early = (curves[key].values[..., curves[key].versions.index(version)] for key in (ours, theirs))
    early = spread.difference(our_early, their_early)
    end = Spread.of(curve.end for curve in curves.values()).difference(curves[ours].end, curves[theirs].end)
    above, below = (early.p_above(0.0), end.p_above(0.0)), (early.p_below(0.0), end.p_below(0.0))
    shown = _some([np.maximum(*above), np.maximum(*below)])
    refuted = _some([np.maximum(above[0], below[1]), np.maximum(below[0], above[1])])
    return Tested(shown, refuted, end)


def forecast(errors: Mapping[CellKey, Array], key: CellKey) -> Tested:
    """`errors`: forecast less measurement of each run."""
    error = Spread.of(errors.values()).mean(errors[key])
    within = np.maximum(error.p_above(-FORECAST_MARGIN), error.p_below(FORECAST_MARGIN))
    outside = _some([error.p_above(FORECAST_MARGIN), error.p_below(-FORECAST_MARGIN)])
    return Tested(within, outside, error)


def evaluate(
    judge: Better | Decays | Holds | Faster | Forecast | Order,
    condition: str,
    curves: Curves,
    others: list[str],
    target: float | None,
    errors: Mapping[CellKey, Array],
) -> Tested:
    """The p-values of one claim in one condition; `others` are the arms that it is compared with."""
    key = condition, judge.arm
    match judge:
        case Better():
            return better(curves, key, [(condition, other) for other in others])
        case Decays():
            return decays(curves, key)
        case Holds():
            return holds(curves, key)
        case Faster(than=than, cost=cost):
            return faster(curves, key, (condition, than), cost, target or 1.0)
        case Order(than=than, share=share):
            return order(curves, key, (condition, than), share)
        case Forecast():
            return forecast(errors, key)


def _fall(curves: Curves, key: CellKey, version: int) -> Estimate:
    """From one version to the end, with the spread of the same fall in every cell evaluated there."""
    spread = Spread.of(-curve.rise(version) for curve in curves.values() if version in curve.versions)
    return spread.mean(-curves[key].rise(version))


def _some(p: list[Array]) -> Array:
    return np.minimum(len(p) * np.min(p, axis=0), 1.0)


def _least(estimates: list[Estimate]) -> Estimate:
    """The estimate with the smallest value, at each place."""
    values, errors = (np.stack([getattr(one, name) for one in estimates]) for name in ("value", "error"))
    place = values.argmin(axis=0)[None]
    df = estimates[0].df
    return Estimate(*(np.take_along_axis(array, place, axis=0)[0] for array in (values, errors)), df)
