"""`python -m tests.evidence.precision`: BF16/FP8, FP8/FP8 and BF16/BF16 (learner / rollouts) in one table.

Each cell of precision.yaml is an ordinary `evenkeel train` on the real engine and the real learner; FP8/FP8 trains
under `learner.fp8_emulation`. Killed and started again it goes on where it was. What was measured is kept in
docs/evidence/precision.json, and the table is printed from there; `--page` only prints.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from pipeline.errors import EvenKeelError
from tests.evidence.matrix import REPOSITORY, Experiment, cells_of, read_matrix
from tests.evidence.results import Result, keep, load
from tests.evidence.runner import check_unchanged, is_settled, make_model, run_jobs, say, train_job
from tests.evidence.statistics import ALPHA, Array

KEPT = REPOSITORY / "docs" / "evidence" / "precision.json"
NAME = "precision"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 when a cell failed."""
    options = _parse(arguments)
    matrix = read_matrix(Path(__file__).with_suffix(".yaml"))
    experiment = matrix.experiments[NAME]
    arms = options.arms or experiment.arms
    declared = list(cells_of(matrix, NAME, options.root))
    cells = [cell for cell in declared if cell.seed in options.seeds and cell.arm in arms]
    if not options.page:
        try:
            check_unchanged(cells)
            make_model(matrix.models[experiment.model], experiment.model, options.root, say)
        except EvenKeelError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        jobs = [train_job(cell) for cell in cells if not is_settled(cell)]
        failures = run_jobs(jobs, at_once=options.jobs, say=say)
        for name, reason in failures.items():
            say(f"{name} failed: {reason}")
        keep(KEPT, declared, experiment.series, ("finished",))
    print(table(experiment, load(KEPT)))
    return int(not options.page and bool(failures))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.evidence.precision", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--page", action="store_true", help="run nothing")
    parser.add_argument("--jobs", type=int, default=2, help="cells beside one another, one core each (default 2)")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[1, 2, 3])
    parser.add_argument("--arms", type=lambda text: text.split(","), help="of precision.yaml; default: all")
    parser.add_argument("--root", type=Path, default=REPOSITORY / "runs" / NAME, help="where run directories live")
    return parser.parse_args(arguments)


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


if __name__ == "__main__":
    sys.exit(main())
