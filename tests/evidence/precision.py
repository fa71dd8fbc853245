"""BF16/FP8, FP8/FP8 and BF16/BF16 (learner / rollouts) in one table, of the cells of precision.yaml.

Each cell of precision.yaml is an ordinary `evenkeel train` on the real engine and the real learner; FP8/FP8 trains
under `learner.fp8_emulation`. Killed and started again it goes on where it was. What was measured is kept in
docs/evidence/precision.json, and the table is printed from there; `--page` only prints.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats

from tests.evidence.matrix import Experiment
from tests.evidence.results import Result
from tests.evidence.statistics import ALPHA, Array


def table(experiment: Experiment, results: Sequence[Result]) -> str:
    """Means over runs of the mean over steps, ± half of the 95 % interval with the run as the unit."""
    lines = [
        "| learner / rollouts | runs | ESS | 1 − ESS | k3 | mean gap, nats | reward, last 6 steps | held-out pass@1 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm, variant in experiment.arms.items():
        found = [result for result in results if result.arm == arm]
        if not found:
            continue
        ess, k3, gap = (_means(found, name) for name in ("ess", "k3_kl", "log_ratio_abs_mean"))
        reward = np.array([np.mean(_values(result, "reward_mean")[-6:]) for result in found])
        held_out = np.array([result.pass_at(1)[-1].mean() for result in found])
        # A metric is kept to five digits.
        lost = _shown(1 - ess, ".1e") if (1 - ess).max() > 1e-5 else "below 1e-05"
        cells = [variant.title, str(len(found)), _shown(ess, ".4f"), lost, _shown(k3, ".1e")]
        cells += [_shown(gap, ".1e"), _shown(reward, ".3f"), _shown(held_out, ".3f")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _values(result: Result, name: str) -> list[float]:
    return [value for value in result.series[name] if value is not None]


def _means(results: Sequence[Result], name: str) -> Array:
    """[runs]"""
    return np.array([np.mean(_values(result, name)) for result in results])


def _shown(values: Array, form: str) -> str:
    mean = format(values.mean(), form)
    if len(values) < 2:
        return mean
    half = stats.t.isf(ALPHA / 2, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return f"{mean} ± {format(half, form)}"
