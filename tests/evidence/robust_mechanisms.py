"""What ESS, entropy, gradient and step size did in the runs of robust.yaml: a table a cell, best arm first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.evidence.matrix import Matrix, cells_of
from tests.evidence.results import Arm, Result
from tests.evidence.robust_table import Score, markdown_row

LATE = 0.25
"""The last share of the steps, where a table says what became of a metric."""


@dataclass(frozen=True)
class Trace:
    """A figure of a run, out of one metric of its steps."""

    title: str
    metric: str
    of: Callable[[Sequence[float]], float]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _late(values: Sequence[float]) -> float:
    return _mean(values[-max(1, round(LATE * len(values))) :])


AGE = Trace("age", "lag_mean", _mean)
TRACES = (
    Trace("lowest ESS", "ess", min),
    Trace("ESS, late", "ess", _late),
    Trace("entropy, late", "entropy", _late),
    Trace("gradient norm, late", "grad_norm", _late),
    Trace("largest gradient norm", "grad_norm", max),
    Trace("solved in training, best", "solve_rate", max),
    Trace("solved in training, late", "solve_rate", _late),
)
FACTOR = "lr_factor"


def mechanisms(matrix: Matrix, name: str, results: Sequence[Result]) -> list[str]:
    """The tables of one experiment, in Markdown; nothing where nothing is measured."""
    experiment = matrix.experiments[name]
    stale = FACTOR in experiment.series
    traces = [AGE, *TRACES] if stale else [*TRACES]
    header = ["arm", "pass@1 at the end", *["mean learning rate"] * stale, *(trace.title for trace in traces)]
    rates = {cell.arm: cell.resolved().learner.optimizer.lr for cell in cells_of(matrix, name, Path("runs"))}
    lines: list[str] = []
    for condition, variant in experiment.conditions.items():
        arms = {arm: Arm.of(results, condition, arm) for arm in experiment.arms}
        ends = {arm: Score.of(one).mean for arm, one in arms.items() if one.results}
        if not ends:
            continue
        lines += ["", f"### {variant.title}", "", markdown_row(header), "|---" * len(header) + "|"]
        for arm in sorted(ends, key=lambda arm: -ends[arm]):
            numbers = [experiment.arms[arm].title, f"{ends[arm]:.2f}"]
            if stale:
                factor = _over_runs(arms[arm], FACTOR, _mean)
                numbers.append("–" if factor is None else f"{rates[arm] * factor:.2e}")
            figures = [_over_runs(arms[arm], trace.metric, trace.of) for trace in traces]
            numbers += ["–" if figure is None else f"{figure:.3g}" for figure in figures]
            lines.append(markdown_row(numbers))
    late = (
        f"*Late*: the mean over the last {LATE:.0%} of the steps. Each figure is one of a run, and the mean over seeds."
    )
    return [*lines, "", late] if lines else []


def _over_runs(arm: Arm, metric: str, of: Callable[[Sequence[float]], float]) -> float | None:
    """The mean over the runs that noted the metric."""
    runs = [values for values in arm.metric(metric) if values]
    return _mean([of(values) for values in runs]) if runs else None
