"""Samples and seconds to a held-out pass@1 under sync, async and staged.

    curves   each cell of schedules.yaml is an ordinary `evenkeel train`; held-out pass@1 of published versions alone
    clocks   `--clock N`: runs without evaluations, each of the arm that has fewest, until all arms have N; the
             learner has a core of its own, engine and collector share another one (tests.bench.pace). Seconds of a
             step, over whole stages. Smaller steps cost no time, so an arm by age has the clock of its twin.
             `--clock N --one` takes one run alone, where a machine is quiet for minutes only

The seconds to a version are its steps times the arm's median seconds of a step: to evaluate in an asynchronous run
would stop what its seconds are about. Nothing is drawn between two evaluated versions: what counts is the first that
reaches the target. Killed and started again it goes on where it was; clocks want a quiet machine. What was measured is
kept in docs/evidence/schedules*.json, and the table is printed from there; `--page` only prints.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pipeline.config.loader import load_recipe
from pipeline.data.event_log import read_metrics
from pipeline.data.files import write_atomically
from tests.bench.pace import train
from tests.evidence.matrix import REPOSITORY, Cell, Experiment, Matrix
from tests.evidence.results import Result
from tests.evidence.runner import make_model, say

CLOCKS = REPOSITORY / "docs" / "evidence" / "schedules-clocks.json"
LEVELS = (0.6, 0.7)
"""Held-out pass@1 whose price is compared."""
CLOCK_STEPS, CLOCK_WARM = 32, 16
"""Both whole stages; the first steps are left out."""
ROUNDING = 1e-9
"""pass@k of six answers of ten may be less than 0.6 by this."""

Clocks = dict[str, list[float]]
"""Arm → seconds of a step, one a run."""


def take_clocks(matrix: Matrix, cells: Sequence[Cell], count: int, *, once: bool) -> None:
    """Runs until each arm has `count`, or one of them; each is kept at once."""
    model = matrix.experiments[cells[0].experiment].model
    make_model(matrix.models[model], model, cells[0].root, say)
    arms = {cell.arm: cell for cell in cells if clock_of(cell.arm) == cell.arm}
    while (arm := next_arm(list(arms), read_clocks(), count)) is not None:
        with tempfile.TemporaryDirectory(prefix="evenkeel-clock-") as scratch:
            seconds = clock(arms[arm], Path(scratch))
        say(f"{arm}: {seconds:.3f} s a step")
        known = read_clocks()
        known.setdefault(arm, []).append(round(seconds, 4))
        write_atomically(CLOCKS, json.dumps(known, indent=2) + "\n")
        if once:
            return


def next_arm(arms: Sequence[str], known: Clocks, count: int) -> str | None:
    """The first of those with the fewest runs, so that arms take turns; None where each has `count`."""
    arm = min(arms, key=lambda arm: len(known.get(arm, [])))
    return arm if len(known.get(arm, [])) < count else None


def clock_of(arm: str) -> str:
    """The arm whose seconds of a step an arm has: lr_by_lag costs none."""
    return arm.removesuffix("_age")


def clock(cell: Cell, folder: Path) -> float:
    """Seconds of a step of the cell's training where nothing is evaluated on the way."""
    values = {"run.name": "clock", "run.root": str(folder), "run.steps": CLOCK_STEPS, "evaluation.every": 10_000}
    sets = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    recipe = load_recipe(cell.recipe, [*cell.overrides, *sets])
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    train(folder / "clock", folder / "recipe.yaml", folder / "logs")
    ends = [float(line["time"]) for line in read_metrics(folder / "clock")]
    # The last stage ends with the run's last publish and checkpoint, behind its line.
    return (ends[-1] - ends[CLOCK_WARM - 1]) / (CLOCK_STEPS - CLOCK_WARM)


def read_clocks() -> Clocks:
    """None where none was taken."""
    return Clocks(json.loads(CLOCKS.read_text())) if CLOCKS.exists() else {}


def table(experiment: Experiment, results: Sequence[Result]) -> str:
    """An arm a row; of runs the median, the lowest and the highest."""
    clocks = read_clocks()
    prices = [f"{what} to {level:g}" for level in LEVELS for what in ("samples", "seconds")]
    header = ["schedule", "s a step", "runs", "pass@1 at the start", "at the end", *prices]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for arm, variant in experiment.arms.items():
        found = [result for result in results if result.arm == arm]
        if not found:
            continue
        scores = [result.pass_at(1).mean(axis=1) for result in found]
        paces = clocks.get(clock_of(arm), [])
        row = [variant.title, spread(paces, ".2f"), str(len(found))]
        row += [spread([float(one[place]) for one in scores], ".3f") for place in (0, -1)]
        for level in LEVELS:
            reached = [first_at(result, level) for result in found]
            missed = f"; not in {reached.count(None)} of {len(reached)}" if None in reached else ""
            versions = [version for version in reached if version is not None]
            row.append(spread([version * found[0].samples_per_step for version in versions], ",.0f") + missed)
            step_s = [statistics.median(paces)] if paces else []
            row.append(spread([version * one for version in versions for one in step_s], ".1f") + missed)
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def first_at(result: Result, target: float) -> int | None:
    """The first evaluated version whose pass@1 is at least `target`."""
    scores = result.pass_at(1).mean(axis=1)
    return next(
        (version for version, score in zip(result.versions, scores, strict=True) if score > target - ROUNDING), None
    )


def spread(values: Sequence[float], form: str) -> str:
    """`median (lowest to highest)`."""
    if not values:
        return "–"
    median, low, high = (format(value, form) for value in (statistics.median(values), min(values), max(values)))
    return f"{median} ({low} to {high})" if len(values) > 1 else median
