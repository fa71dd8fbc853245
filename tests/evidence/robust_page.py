"""docs/robust.md: which objective works in every cell, why the worst ones fail, and what the seeds could have shown.

Everything follows from robust.yaml and the results; no sentence holds a number of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.data.files import write_atomically
from tests.evidence.ages import told
from tests.evidence.matrix import Experiment, Matrix
from tests.evidence.plots import draw, draw_shares
from tests.evidence.results import Arm, Result
from tests.evidence.robust_contrasts import asked_beforehand
from tests.evidence.robust_mechanisms import mechanisms
from tests.evidence.robust_repeat import REPEATS, Repeats
from tests.evidence.robust_table import (
    BAR,
    CONTROL,
    FRESH,
    Results,
    RobustTable,
    Score,
    base_of,
    markdown_row,
    stand_in,
)
from tests.evidence.statistics import ALPHA, Spread, visible_difference

EARLY = 60
"""The version that every run has an evaluation of: the end of the fresh ones, the middle of the others."""
ARMS = """\
Every arm has its own objective, or its own size of step; all else is one recipe. The learning rate is constant at
{rate} (AdamW), and was tuned for no arm. *Ratio* is the learner's probability of a token over the engine's.

| arm | what a token's gradient is weighed by |
|---|---|
| CISPO, cap 5 | the ratio, 5 at most |
| GRPO, clip c | the ratio; none where it has left 1 ± c in the direction of the advantage |
| P3O's cap alone | the ratio, at most the effective sample size (ESS) of the step, which is at most 1 |
| P3O, official KL | the same; beside it (1 − ESS) times a KL divergence to the engine, as in the authors' code |
| P3O, importance KL | the same with an estimate of the KL divergence that is unbiased for the engine's samples |
| decoupled PPO | the ratio of the learner that sampled to its engine, 5 at most; a clip of 0.2 around that learner |
| split | as CISPO; beside it a KL divergence to the learner that sampled, not to the engine |
| …, by age | the same, and each step's learning rate is divided by √(1 + age of its samples) |
| …, lr / √(1 + lag) | the same, at a smaller constant rate |
| …, by ESS | the same, and the learning rate shrinks with the ESS of what the learner has changed since |"""


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
    early = RobustTable.of(matrix, results, version=EARLY)
    lines = [
        "# One objective that never collapses?",
        "",
        *_answer(matrix, table, early),
        *_control(matrix, results),
        "",
    ]
    lines += ["## The arms", "", ARMS.format(rate=_rate(matrix)), ""]
    lines += ["## Every arm in every cell", "", *_cells(matrix, table, early)]
    if table.scores:
        lines += ["", "![Each arm's share of the best arm of its cell](evidence/robust.png)"]
    if asked := asked_beforehand(table):
        lines += ["", "## What was asked before any run", "", *asked]
    for name, experiment in matrix.experiments.items():
        measured = results.get(name, [])
        lines += ["", f"## {experiment.title}", "", experiment.text, "", *_power(experiment, measured)]
        if ages := told([Arm.of(measured, c, a) for c in experiment.conditions for a in experiment.arms]):
            lines += ["", ages]
        lines += mechanisms(matrix, name, measured)
        if _contrast(experiment, measured):
            lines += ["", f"![{experiment.title}](evidence/robust-{name}.png)"]
    return "\n".join(lines).rstrip() + "\n"


def _answer(matrix: Matrix, table: RobustTable, early: RobustTable) -> list[str]:
    """The bar and who passes it; what is lacking where that cannot be said yet."""
    lines = [
        "Written by `python -m tests.evidence.robust` from `tests/evidence/robust.yaml`, which lists arms, seeds and "
        "cells and, but for what it says was declared later, is older than every result. "
        f"The bar: one arm ends at {BAR} or more of the best arm in every cell. Small models show mechanisms, not "
        "sizes of effects.",
        "",
    ]
    if not table.scores:
        return [*lines, "**Nothing is measured yet.**"]
    passing = [arm for arm, share in table.whole.items() if share >= BAR]
    if not table.whole:
        lines.append(f"**Not known yet:** no arm has been measured in all {len(table.cells)} cells.")
    elif passing:
        lines += [f"**{len(passing)} of {len(table.whole)} arms pass the bar:**", ""]
    else:
        lines += ["**No arm passes the bar.** The nearest:", ""]
    lines += _passing(table, passing or list(table.whole)[:1])
    late = [arm for arm, share in early.whole.items() if share >= BAR and arm in table.whole and arm not in passing]
    if late:
        named = "; ".join(f"{table.titles[arm]} ({early.worst_share(arm):.2f})" for arm in late)
        lines += [
            "",
            f"After {EARLY} updates, half of the stale runs, these were above the bar as well: {named}. They learned, "
            "and fell later: of such a run the best checkpoint is worth more than the last.",
        ]
    runs = {len(row[cell].ends) for row in table.scores.values() for cell in row}
    declared = max(len(one.seeds) for one in matrix.experiments.values())
    if min(runs) < declared:
        lines += [
            "",
            f"Some scores have {min(runs)} of {declared} seeds. Arms that passed got their third seed first, and a "
            "seed has prompts of its own, so compare them within seeds.",
        ]
    return lines


def _control(matrix: Matrix, results: Results) -> list[str]:
    """Where nothing differs: whether an arm that fails elsewhere would have failed anyway."""
    experiment, measured = matrix.experiments[CONTROL], results.get(CONTROL, [])
    arms = [(one.title, Arm.of(measured, c, a)) for c in experiment.conditions for a, one in experiment.arms.items()]
    ends = [f"{title} {Score.of(arm)}" for title, arm in arms if arm.results]
    return ["", f"Where nothing differs, for comparison: {'; '.join(ends)}."] if ends else []


def _passing(table: RobustTable, arms: Sequence[str]) -> list[str]:
    """A table of these arms: what they reach, and how often they would again."""
    if not arms:
        return []
    repeats = Repeats.of(table)
    header = ["arm", "worst share", "in", "mean share", "seeds a cell", "cells of its own"]
    header += ["passes again", "first again"] if repeats else []
    lines = [markdown_row(header), "|---" * len(header) + "|"]
    for arm in arms:
        own, share = len(table.own_cells(arm)), f"{table.worst_share(arm):.2f}"
        row = [table.titles[arm], share, table.cells[table.worst_cell(arm)], f"{table.mean_share(arm):.2f}"]
        row += [f"{table.least_seeds(arm)} or more", f"{own} of {len(table.cells)}"]
        row += [f"{repeats.passes[arm]:.0%}", f"{repeats.first[arm]:.0%}"] if repeats else []
        lines.append(markdown_row(row))
    lines += [
        "",
        "*Cells of its own*: where nothing is stale, split and decoupled PPO are CISPO and the factor by age is 1, so "
        "that one arm's runs stand for several.",
    ]
    if repeats:
        lines[-1] += (
            f" *Passes again*, *first again*: shares of {REPEATS:,} repetitions, in which the mean of every cell is "
            "drawn around what was measured with that cell's own scatter. The best of a cell is the largest of many "
            "noisy numbers and counts high twice here, so an arm that is as good as it looks passes more often."
        )
        if repeats.first[max(repeats.first, key=lambda arm: repeats.first[arm])] < 1.0 - ALPHA:
            lines[-1] += " Which of them is first is not decided."
    return lines


def _cells(matrix: Matrix, table: RobustTable, early: RobustTable) -> list[str]:
    """The table of all scores."""
    header = ["arm", *table.cells.values(), "worst", "worst share", f"worst share at {EARLY}"]
    lines = [markdown_row(header), "|---" * len(header) + "|"]
    for arm, row in table.scores.items():
        numbers = [str(row[cell]) if cell in row else _missing(matrix, arm, cell[0]) for cell in table.cells]
        worst = min(one.mean for one in row.values())
        count = "" if arm in table.whole else f" ({len(row)} of {len(table.cells)} cells)"
        before = f"{early.worst_share(arm):.2f}{count}" if arm in early.scores else "–"
        numbers += [f"{worst:.2f}", f"{table.worst_share(arm):.2f}{count}", before]
        lines.append(markdown_row([table.titles[arm], *numbers]))
    spreads = [table.spread(cell) for cell in table.cells]
    known = [f"{float(spread.sd):.3f}" if spread.df > 0 else "–" for spread in spreads]
    lines.append(markdown_row(["*run-to-run standard deviation*", *known, "", "", ""]))
    return [
        *lines,
        "",
        "Held-out pass@1 of the last version: the mean, and each seed in brackets. The engine that serves the version "
        "answers, in its own format and at T = 1, also where training samples at another temperature. = are the runs "
        "of the arm that this one is where nothing is stale; … is not run yet, – is not declared. A share is that of "
        "the best arm of the cell, the largest of many noisy numbers, so shares err on the low side, but for that of "
        "the arm that is chosen as the best of all." + _more(matrix),
    ]


def _more(matrix: Matrix) -> str:
    """Where scores have further seeds."""
    where = "; ".join(
        f"{experiment.conditions[condition].title} ({', '.join(experiment.arms[arm].title for arm in arms)})"
        for experiment in matrix.experiments.values()
        for condition, arms in experiment.more.items()
    )
    return (
        f" Further seeds were declared after all others had run, where verdicts hang on few: {where}." if where else ""
    )


def _missing(matrix: Matrix, arm: str, experiment: str) -> str:
    """Whether a score is still to come."""
    run = stand_in(arm) if experiment == FRESH else arm
    return "…" if run in matrix.experiments[experiment].arms else "–"


def _rate(matrix: Matrix) -> str:
    (rate,) = {one.set["learner.optimizer"]["lr"] for one in matrix.models.values()}
    return f"{rate:g}"


def _power(experiment: Experiment, results: Sequence[Result]) -> list[str]:
    """What difference of two arms the seeds of an experiment could show."""
    ends = [Arm.of(results, c, a) for c in experiment.conditions for a in experiment.arms]
    spread = Spread.of(one.run_curve().end for one in ends if one.results)
    if spread.df < 1 or not spread.sd > 0.0:
        return ["What the seeds could show is not known: no arm has two of them."]
    runs = min(len(one.results) for one in ends if one.results)
    seeds = f"{runs} seeds" if runs > 1 else "one seed"
    visible = visible_difference(float(spread.sd), runs, spread.df, ALPHA)
    return [
        f"Run-to-run standard deviation {float(spread.sd):.3f} ({spread.df} degrees of freedom), pooled over cells "
        "that do not all scatter alike: the last line of the table above has each. With "
        f"{seeds} a true difference of {visible:.2f} between two arms would be seen four times in five by a one-sided "
        "test, one comparison at a time."
    ]


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
