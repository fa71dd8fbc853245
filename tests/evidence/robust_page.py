"""docs/robust.md: which objective works in every cell, why the worst ones fail, and what the seeds could have shown.

Everything follows from robust.yaml and the results; no sentence holds a number of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.data.files import write_atomically
from tests.evidence.ages import told
from tests.evidence.matrix import Experiment, Matrix
from tests.evidence.plots import draw, draw_shares
from tests.evidence.results import Arm, Result
from tests.evidence.robust_table import BAR, Results, RobustTable, Score, base_of
from tests.evidence.statistics import ALPHA, Spread, visible_difference

LATE = 0.25
"""The last share of the steps, where a table says what became of a metric."""


def write_page(matrix: Matrix, results: Results, path: Path) -> None:
    """The page, and its pictures beside the results."""
    folder = path.parent / "evidence"
    table = RobustTable.of(matrix, results)
    if table.scores:
        shares = {table.titles[arm]: [row.get(cell) for cell in table.cells] for arm, row in table.shares.items()}
        draw_shares(shares, list(table.cells.values()), BAR, folder / "robust.png")
    for name, experiment in matrix.experiments.items():
        if shown := _contrast(experiment, results.get(name, [])):
            draw(shown, results[name], folder / f"robust-{name}.png")
    write_atomically(path, page(matrix, results, table))


def page(matrix: Matrix, results: Results, table: RobustTable) -> str:
    """docs/robust.md: the answer, then the table of cells and arms, then what it could have shown."""
    header = ["arm", *table.cells.values(), "worst", "worst ÷ best of the cell"]
    lines = ["# One objective that never collapses?", "", *_answer(table), ""]
    lines += ["## Every arm in every cell", "", _row(header), "|---" * len(header) + "|"]
    for arm, row in table.scores.items():
        numbers = [str(row[cell]) if cell in row else "–" for cell in table.cells]
        worst = min(one.mean for one in row.values())
        count = "" if arm in table.whole else f" ({len(row)} of {len(table.cells)} cells)"
        lines.append(_row([table.titles[arm], *numbers, f"{worst:.2f}", f"{table.worst_share(arm):.2f}{count}"]))
    lines += [
        "",
        "Held-out pass@1 at T = 1 of the last version: the mean, and each seed in brackets; – was not run yet; = are "
        "the runs of the arm that this one is where nothing is stale. The "
        "best of a cell is the largest of many noisy numbers, so these shares err on the low side, most where seeds "
        "are few.",
    ]
    if table.scores:
        lines += ["", "![Each arm's share of the best arm of its cell](evidence/robust.png)"]
    for name, experiment in matrix.experiments.items():
        measured = results.get(name, [])
        lines += ["", f"## {experiment.title}", "", experiment.text, "", _power(matrix, name, measured)]
        if ages := told([Arm.of(measured, c, a) for c in experiment.conditions for a in experiment.arms]):
            lines += ["", ages]
        lines += _mechanisms(experiment, measured)
        if _contrast(experiment, measured):
            lines += ["", f"![{experiment.title}](evidence/robust-{name}.png)"]
    return "\n".join(lines).rstrip() + "\n"


def _answer(table: RobustTable) -> list[str]:
    """The bar and who passes it; what is lacking where that cannot be said yet."""
    lines = [
        "Written by `python -m tests.evidence.robust` from `tests/evidence/robust.yaml`, which lists arms, seeds and "
        f"cells and is older than every result. The bar: one arm ends at {BAR} or more of the best arm in every cell. "
        "Small models show mechanisms, not sizes of effects.",
        "",
    ]
    if not table.scores:
        return [*lines, "**Nothing is measured yet.**"]
    named = [
        f"{table.titles[arm]} ({share:.2f}, in the mean {table.mean_share(arm):.2f}, {table.least_seeds(arm)} or more "
        "seeds a cell)"
        for arm, share in table.whole.items()
    ]
    passing = sum(share >= BAR for share in table.whole.values())
    if not named:
        lines.append(f"**Not known yet:** no arm has been measured in all {len(table.cells)} cells.")
    elif passing:
        lines.append(f"**Passes the bar:** {', '.join(named[:passing])}.")
    else:
        lines.append(f"**No arm passes the bar.** The nearest is {named[0]}.")
    fewest = min(map(table.least_seeds, table.scores))
    if fewest < 3:
        some = f"{fewest} seed{'s' if fewest > 1 else ''}"
        lines += ["", f"Some scores have {some}: a screen, which ranks what to run next and decides nothing."]
    return lines


def _power(matrix: Matrix, name: str, results: Sequence[Result]) -> str:
    """What difference of two arms the seeds of an experiment could show."""
    experiment = matrix.experiments[name]
    ends = [Arm.of(results, c, a) for c in experiment.conditions for a in experiment.arms]
    spread = Spread.of(one.run_curve().end for one in ends if one.results)
    if spread.df < 1 or not spread.sd > 0.0:
        return "What the seeds could show is not known: no arm has two of them."
    runs = min(len(one.results) for one in ends if one.results)
    seeds = f"{runs} seeds" if runs > 1 else "one seed"
    visible = visible_difference(float(spread.sd), runs, spread.df, ALPHA)
    return (
        f"Run-to-run standard deviation {float(spread.sd):.3f} ({spread.df} degrees of freedom). With {seeds} a "
        f"true difference of {visible:.2f} between two arms would be seen four times in five, one comparison at a time."
    )


@dataclass(frozen=True)
class Trace:
    """A figure of a run, out of one metric of its steps."""

    title: str
    metric: str
    of: Callable[[Sequence[float]], float]


def _late(values: Sequence[float]) -> float:
    return float(np.mean(values[-max(1, round(LATE * len(values))) :]))


TRACES = (
    Trace("age", "lag_mean", lambda values: float(np.mean(values))),
    Trace("factor on lr", "lr_factor", lambda values: float(np.mean(values))),
    Trace("lowest ESS", "ess", min),
    Trace("ESS, late", "ess", _late),
    Trace("entropy, late", "entropy", _late),
    Trace("gradient norm, late", "grad_norm", _late),
    Trace("largest gradient norm", "grad_norm", max),
    Trace("solved in training, best", "solve_rate", max),
    Trace("solved in training, late", "solve_rate", _late),
)


def _mechanisms(experiment: Experiment, results: Sequence[Result]) -> list[str]:
    """A table a condition, best arm first: what ESS, entropy, gradient and step size did."""
    traces = [trace for trace in TRACES if trace.metric in experiment.series]
    header = ["arm", "pass@1 at the end", *(trace.title for trace in traces)]
    lines: list[str] = []
    for condition, variant in experiment.conditions.items():
        arms = {arm: Arm.of(results, condition, arm) for arm in experiment.arms}
        ends = {arm: Score.of(one).mean for arm, one in arms.items() if one.results}
        if not ends:
            continue
        lines += ["", f"### {variant.title}", "", _row(header), "|---" * len(header) + "|"]
        for arm in sorted(ends, key=lambda arm: -ends[arm]):
            runs = {trace: [v for v in arms[arm].metric(trace.metric) if v] for trace in traces}
            numbers = [f"{np.mean([t.of(run) for run in runs[t]]):.3g}" if runs[t] else "–" for t in traces]
            lines.append(_row([experiment.arms[arm].title, f"{ends[arm]:.2f}", *numbers]))
    late = f"*Late*: the mean over the last {LATE:.0%} of the steps. Means over seeds."
    return [*lines, "", late] if lines else []


def _contrast(experiment: Experiment, results: Sequence[Result]) -> Experiment | None:
    """The experiment with the arms that a picture can tell apart: in the first condition that was measured the best,
    the worst, and the worst one's twins with smaller steps. None before there are two."""
    for condition in experiment.conditions:
        arms = {arm: Arm.of(results, condition, arm) for arm in experiment.arms}
        ends = {arm: Score.of(one).mean for arm, one in arms.items() if one.results}
        if len(ends) > 1:
            worst, best = min(ends, key=lambda arm: ends[arm]), max(ends, key=lambda arm: ends[arm])
            shown = {arm: one for arm, one in experiment.arms.items() if arm == best or base_of(arm) == base_of(worst)}
            measured = {key: one for key, one in experiment.conditions.items() if _has(results, key)}
            return experiment.model_copy(update=dict(arms=shown, conditions=measured))
    return None


def _has(results: Sequence[Result], condition: str) -> bool:
    return any(one.condition == condition for one in results)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
