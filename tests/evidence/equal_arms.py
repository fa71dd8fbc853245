"""How often the page is wrong: pages of arms that do not differ, judged by the rules of the page.

The simulated experiments have the conditions, arms, seeds and evaluations that were recorded. All arms of one share a
curve, the mean of the recorded ones made non-decreasing; each evaluation of each run adds normal noise with the
experiment's recorded run-to-run standard deviation at the end, or with that of its own cell (`scatter`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import numpy as np

from tests.evidence.claims import adjusted_p, curves_of, pass_at
from tests.evidence.hypotheses import DECAY, CellKey, Curve, Tested, evaluate
from tests.evidence.matrix import COMPARING, Decays, Experiment, Forecast, Holds
from tests.evidence.results import Result
from tests.evidence.statistics import ALPHA, Array, Spread

NUM_PAGES = 2000

Scatter = Literal["alike", "own"]
"""Whether arms of an experiment scatter alike, as the verdicts assume, or each as its own few runs do."""


def false_page_rate(
    experiments: Mapping[str, Experiment],
    results: Mapping[str, Sequence[Result]],
    *,
    falls: bool,
    scatter: Scatter = "alike",
) -> float:
    """The share of NUM_PAGES pages with any false verdict.

    Any verdict of a comparison is false. Where `falls`, the last evaluation lies DECAY lower, so that it is false that
    an arm holds and true that it decays; otherwise the other way round. A forecast is not simulated and counts as 1.
    """
    rng = np.random.default_rng(0)
    tested: list[Tested | None] = []
    wrong: list[tuple[bool, bool]] = []
    for name, experiment in experiments.items():
        simulated: dict[int, dict[CellKey, Curve]] = {}
        for claim in experiment.claims:
            k = pass_at(claim)
            if k not in simulated:
                simulated[k] = simulate(curves_of(experiment, results[name], k), rng, falls=falls, scatter=scatter)
            for condition in claim.conditions or experiment.conditions:
                others = experiment.others(claim) if isinstance(claim.judge, COMPARING) else []
                known = all((condition, arm) in simulated[k] for arm in (claim.judge.arm, *others))
                one = None
                if known and not isinstance(claim.judge, Forecast):
                    one = evaluate(claim.judge, condition, simulated[k], others, experiment.target, {})
                tested.append(one)
                wrong.append(_false_verdicts(claim.judge, falls))
    false = np.zeros(NUM_PAGES, bool)
    for p, sides in zip(adjusted_p(tested), wrong, strict=True):
        for side in (0, 1):
            false |= (p[side] <= ALPHA) & sides[side]
    return float(false.mean())


def _false_verdicts(judge: object, falls: bool) -> tuple[bool, bool]:
    """Whether `shown` and whether `refuted` would be false."""
    if isinstance(judge, Decays):
        return not falls, falls
    if isinstance(judge, Holds):
        return falls, not falls
    return True, True


def simulate(
    recorded: Mapping[CellKey, Curve], rng: np.random.Generator, *, falls: bool, scatter: Scatter
) -> dict[CellKey, Curve]:
    """Curves with values [pages, runs, evaluations]."""
    pooled = run_to_run_sd(recorded.values())
    simulated = {}
    for key, curve in recorded.items():
        truth = _common_curve(recorded, curve.versions)
        if falls:
            truth = np.append(np.maximum(truth[:-1], truth[-1]), truth[-1] - DECAY)
            truth[:-1] = np.minimum(truth[:-1], truth[-1] + DECAY)
        sd = run_to_run_sd([curve]) if scatter == "own" else pooled
        noise = rng.normal(0.0, sd, (NUM_PAGES, *curve.values.shape)) if sd else np.zeros((1, *curve.values.shape))
        simulated[key] = Curve(
            versions=curve.versions,
            values=truth + noise,
            samples=curve.samples,
            seconds=curve.samples,  # a sample takes every arm equally long
        )
    return simulated


def run_to_run_sd(curves: Collection[Curve]) -> float:
    """Of the ends, pooled within cells; 0 where no cell has two runs."""
    return float(np.nan_to_num(Spread.of(curve.end for curve in curves).sd)) if curves else 0.0


def _common_curve(recorded: Mapping[CellKey, Curve], versions: Sequence[int]) -> Array:
    """[evaluations] the mean of all cells at `versions`, which never falls."""
    cells = [np.interp(versions, curve.versions, curve.values.mean(axis=0)) for curve in recorded.values()]
    return np.maximum.accumulate(np.mean(cells, axis=0))
