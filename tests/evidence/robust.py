"""`python -m tests.evidence.robust`: which objective never collapses? The cells of robust.yaml, and their page.

    robust.yaml ──cells not settled yet──▶ evenkeel train ──harvest──▶ docs/evidence/robust-*.json ──▶ robust.md beside

`--seeds 1` is the screen; without it all declared seeds run. Killed and started again it goes on where it was, and a
cell whose result is kept is run nowhere again. `--only` takes cells whose name has a text in it, `--page` runs nothing.

An arm that is another one without lag was not run in the fresh cells: the other one's runs stand there (`stand_in`).
"""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from pipeline.data.files import write_atomically
from pipeline.errors import EvenKeelError
from tests.evidence.matrix import REPOSITORY, Matrix, cells_of, read_matrix
from tests.evidence.results import SETTLED, Arm, Result, keep, load, unmeasured
from tests.evidence.runner import check_unchanged, run_cells
from tests.evidence.statistics import ALPHA, Spread, holm

KEPT = REPOSITORY / "docs" / "evidence"
EARLY = 60
"""The version that every run has an evaluation of: the end of the fresh ones, the middle of the others."""
STYLE: dict[Any, Any] = {
    "font.size": 8.0,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
}
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
MATRIX = Path(__file__).with_name("robust.yaml")
BAR = 0.8
"""An arm passes that ends at this share of the best arm, or more, in every cell."""
FRESH = "fresh"
"""The experiment without lag."""
CONTROL = "control"
"""The one where nothing differs; its cells are none of the table's."""

Results = Mapping[str, Sequence[Result]]
"""By experiment."""
Place = tuple[str, str]
"""A cell of the table: experiment and condition."""


def stand_in(arm: str) -> str:
    """The arm that `arm` is where nothing is stale: age 0 leaves the learning rate, lr / √(1 + 0) is lr, and where
    pi_old is pi both split and decoupled PPO are CISPO."""
    base = base_of(arm)
    return "cispo" if base in ("split", "decoupled") else base


def base_of(arm: str) -> str:
    """Without what was done to its steps."""
    return arm.removesuffix("_age").removesuffix("_const").removesuffix("_ess")


def load_results(matrix: Matrix, folder: Path) -> Results:
    """What is kept in the folder of each experiment."""
    return {name: load(results_file(folder, name)) for name in matrix.experiments}


def results_file(folder: Path, experiment: str) -> Path:
    """Where the results of one lie."""
    return folder / f"robust-{experiment}.json"


@dataclass(frozen=True)
class Score:
    """One arm in one cell."""

    ends: list[float]
    """pass@1 of a version, seed by seed; 0 for a run that diverged before."""
    stands_in: bool = False
    """Whether the runs are those of another arm, which this one is without lag."""

    @classmethod
    def of(cls, measured: Arm, *, stands_in: bool = False, version: int | None = None) -> Self:
        """At the end, or at an evaluated version."""
        place = -1 if version is None else measured.versions.index(version)
        return cls(measured.curve()[:, place].mean(axis=1).tolist(), stands_in)

    @property
    def mean(self) -> float:
        return float(np.mean(self.ends))

    def __str__(self) -> str:
        return "=" * self.stands_in + two(self.mean)


@dataclass(frozen=True)
class RobustTable:
    """The whole of it."""

    titles: Mapping[str, str]
    """Of every arm that was measured somewhere, in the order of the matrix."""
    cells: Mapping[Place, str]
    """Title of each cell."""
    scores: Mapping[str, Mapping[Place, Score]]
    """Arm → cell → its score, where it has one."""

    @classmethod
    def of(cls, matrix: Matrix, results: Results, *, version: int | None = None) -> Self:
        """At the end, or at a version that is evaluated in every cell."""
        judged = {name: one for name, one in matrix.experiments.items() if name != CONTROL}
        arms = {arm: one.title for e in reversed(judged.values()) for arm, one in e.arms.items()}
        order = list(dict.fromkeys(arm for e in judged.values() for arm in e.arms))
        cells = {(name, key): one.title for name, e in judged.items() for key, one in e.conditions.items()}
        scores: dict[str, dict[Place, Score]] = {arm: {} for arm in order}
        for (name, condition), arm in ((cell, arm) for cell in cells for arm in order):
            run = arm if arm in matrix.experiments[name].arms else stand_in(arm)
            measured = Arm.of(results.get(name, []), condition, run)
            known = measured.results and (version is None or version in measured.versions)
            if known and (run == arm or name == FRESH):
                scores[arm][name, condition] = Score.of(measured, stands_in=run != arm, version=version)
        measured_arms = {arm: row for arm, row in scores.items() if row}
        return cls(titles={arm: arms[arm] for arm in measured_arms}, cells=cells, scores=measured_arms)

    @cached_property
    def shares(self) -> dict[str, dict[Place, float]]:
        """Arm → cell → its share of the best arm there, where it was measured and somebody got anything."""
        rows = self.scores.values()
        best = {cell: max((row[cell].mean for row in rows if cell in row), default=0.0) for cell in self.cells}
        return {
            arm: {cell: row[cell].mean / best[cell] for cell in self.cells if cell in row and best[cell] > 0.0}
            for arm, row in self.scores.items()
        }

    @cached_property
    def whole(self) -> dict[str, float]:
        """Arms that were measured in every cell, the best first, and their worst share. Arms that are one arm where
        nothing is stale often share their worst cell; the mean over all cells then says which is first."""
        whole = {arm: self.worst_share(arm) for arm, row in self.scores.items() if len(row) == len(self.cells)}
        return dict(sorted(whole.items(), key=lambda item: (-item[1], -self.mean_share(item[0]))))

    def mean_share(self, arm: str) -> float:
        """Over the cells where it was measured."""
        return float(np.mean([*self.shares[arm].values()]))

    def worst_cell(self, arm: str) -> Place:
        """Where its share is lowest."""
        return min(self.cells, key=lambda cell: self.shares[arm].get(cell, 1.0))

    def worst_share(self, arm: str) -> float:
        """Over the cells where it was measured; 1 where nobody got anything."""
        return self.shares[arm].get(self.worst_cell(arm), 1.0)

    def own_cells(self, arm: str) -> list[Place]:
        """Where it was run itself."""
        return [cell for cell, score in self.scores[arm].items() if not score.stands_in]

    def spread(self, cell: Place) -> Spread:
        """Run-to-run, pooled over the arms that were run in the cell."""
        scores = [row[cell] for row in self.scores.values() if cell in row]
        return Spread.of(np.array(score.ends) for score in scores if not score.stands_in)

    def least_seeds(self, arm: str) -> int:
        """Of any of its scores."""
        return min(len(one.ends) for one in self.scores[arm].values())


def two(end: float) -> str:
    """`.64`, `1.00`."""
    return f"{end:.2f}".removeprefix("0")


def markdown_row(cells: Sequence[str]) -> str:
    """One line of a table."""
    return "| " + " | ".join(cells) + " |"


def write_page(matrix: Matrix, results: Results, path: Path) -> None:
    """Write the page, and its picture beside it."""
    table = RobustTable.of(matrix, results)
    if table.scores:
        shares = {table.titles[arm]: [row.get(cell) for cell in table.cells] for arm, row in table.shares.items()}
        draw_shares(shares, list(table.cells.values()), BAR, path.with_suffix(".png"))
    write_atomically(path, page(matrix, results, table))


def page(matrix: Matrix, results: Results, table: RobustTable) -> str:
    """The answer, the arms, and the table of cells and arms."""
    early = RobustTable.of(matrix, results, version=EARLY)
    lines = ["# One objective that never collapses?", "", *_answer(table), *_control(matrix, results), ""]
    lines += ["## The arms", "", ARMS.format(rate=_rate(matrix)), ""]
    lines += ["## Every arm in every cell", "", *_cells(matrix, table, early)]
    if table.scores:
        lines += ["", "![Each arm's share of the best arm of its cell](robust.png)"]
    if asked := asked_beforehand(table):
        lines += ["", "## What was asked before any run", "", *asked]
    return "\n".join(lines).rstrip() + "\n"


def _answer(table: RobustTable) -> list[str]:
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
        return [*lines, f"**Not known yet:** no arm has been measured in all {len(table.cells)} cells."]
    lines += [f"**{len(passing)} of {len(table.whole)} arms pass the bar.**" + " The nearest:" * (not passing), ""]
    header = ["arm", "worst share", "in", "mean share", "seeds a cell", "cells of its own"]
    lines += [markdown_row(header), "|---" * len(header) + "|"]
    for arm in passing or list(table.whole)[:1]:
        own, share = len(table.own_cells(arm)), f"{table.worst_share(arm):.2f}"
        row = [table.titles[arm], share, table.cells[table.worst_cell(arm)], f"{table.mean_share(arm):.2f}"]
        lines.append(markdown_row([*row, f"{table.least_seeds(arm)} or more", f"{own} of {len(table.cells)}"]))
    return [
        *lines,
        "",
        "*Cells of its own*: where nothing is stale, split and decoupled PPO are CISPO and the factor by age is 1, so "
        "that one arm's runs stand for several. Which arm is first is not decided: runs of one arm scatter as the last "
        "line of the table below says.",
    ]


def _control(matrix: Matrix, results: Results) -> list[str]:
    """Where nothing differs: whether an arm that fails elsewhere would have failed anyway."""
    experiment, measured = matrix.experiments[CONTROL], results.get(CONTROL, [])
    arms = [(one.title, Arm.of(measured, c, a)) for c in experiment.conditions for a, one in experiment.arms.items()]
    ends = [f"{title} {Score.of(arm)}" for title, arm in arms if arm.results]
    return ["", f"Where nothing differs, for comparison: {'; '.join(ends)}."] if ends else []


def _cells(matrix: Matrix, table: RobustTable, early: RobustTable) -> list[str]:
    """The table of all scores."""
    header = ["arm", *table.cells.values(), "worst share", f"worst share at {EARLY}"]
    lines = [markdown_row(header), "|---" * len(header) + "|"]
    for arm, row in table.scores.items():
        numbers = [str(row[cell]) if cell in row else _missing(matrix, arm, cell[0]) for cell in table.cells]
        count = "" if arm in table.whole else f" ({len(row)} of {len(table.cells)} cells)"
        before = f"{early.worst_share(arm):.2f}{count}" if arm in early.scores else "–"
        numbers += [f"{table.worst_share(arm):.2f}{count}", before]
        lines.append(markdown_row([table.titles[arm], *numbers]))
    spreads = [table.spread(cell) for cell in table.cells]
    known = [f"{float(spread.sd):.3f}" if spread.df > 0 else "–" for spread in spreads]
    lines.append(markdown_row(["*run-to-run standard deviation*", *known, "", ""]))
    return [
        *lines,
        "",
        "Held-out pass@1 of the last version, the mean over seeds. The engine that serves the version "
        "answers, in its own format and at T = 1, also where training samples at another temperature. = are the runs "
        "of the arm that this one is where nothing is stale; … is not run yet, – is not declared. A share is that of "
        "the best arm of the cell, the largest of many noisy numbers, so shares err on the low side, but for that of "
        "the arm that is chosen as the best of all.",
    ]


def _missing(matrix: Matrix, arm: str, experiment: str) -> str:
    """Whether a score is still to come."""
    run = stand_in(arm) if experiment == FRESH else arm
    return "…" if run in matrix.experiments[experiment].arms else "–"


def _rate(matrix: Matrix) -> str:
    (rate,) = {one.set["learner.optimizer"]["lr"] for one in matrix.models.values()}
    return f"{rate:g}"


def draw_shares(arms: Mapping[str, Sequence[float | None]], cells: Sequence[str], bar: float, path: Path) -> None:
    """A table in colors: each arm's share of the best arm of its cell, cells as columns; blue reaches the bar. What was
    not run stays white."""
    shares = np.array([[np.nan if share is None else share for share in row] for row in arms.values()])
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        size = (2.2 + 0.85 * len(cells), 1.3 + 0.24 * len(arms))
        axes = (figure := Figure(figsize=size, layout="constrained", dpi=110)).subplots()
        axes.imshow(shares, cmap="RdYlBu", vmin=2 * bar - 1, vmax=1.0, aspect="auto")
        for row, column in zip(*np.nonzero(np.isfinite(shares)), strict=True):
            share = shares[row, column]
            color = "white" if share < 2 * bar - 0.95 or share > 0.97 else "black"
            axes.text(column, row, f"{share:.2f}", ha="center", va="center", fontsize=7, color=color)
        axes.set_xticks(range(len(cells)), [textwrap.fill(cell, 12) for cell in cells])
        axes.xaxis.tick_top()
        axes.set_yticks(range(len(arms)), list(arms))
        axes.tick_params(length=0)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Software": None})


def asked_beforehand(table: RobustTable) -> list[str]:
    """A paragraph for each question whose arms were measured."""
    return [line for line in (_cap(table), _age(table)) if line]


def _cap(table: RobustTable) -> str:
    """P3O's cap alone against cap 5, no KL in either, one smaller constant learning rate."""
    pairs = _pairs(table, "p3o_cap_const", "cispo_const")
    if not pairs:
        return ""
    estimates = [table.spread(cell).difference(np.array(five.ends), np.array(cap.ends)) for cell, cap, five in pairs]
    adjusted = holm(np.array([one.p_above(0.0) for one in estimates]))
    cells = "; ".join(
        f"{table.cells[cell]} {two(cap.mean)} against {two(five.mean)} (p {_p(p)})"
        for (cell, cap, five), p in zip(pairs, adjusted, strict=True)
    )
    shown = "fails where a cap of 5 holds" if (adjusted < ALPHA).all() else "is not shown to fail everywhere"
    return (
        f"- **P3O's cap at the ESS {shown}**, without a KL and at lr / √(1 + lag): {cells}; one-sided, with Holm's "
        "correction."
    )


def _age(table: RobustTable) -> str:
    """By age against the constant, over objectives and stale cells."""
    bases = [arm.removesuffix("_age") for arm in table.scores if arm.endswith("_age")]
    pairs = [pair for base in bases for pair in _pairs(table, f"{base}_age", f"{base}_const")]
    spreads = [table.spread(cell) for cell, _, _ in pairs]
    if not pairs or any(spread.df < 1 for spread in spreads):
        return ""
    estimates = [
        spread.difference(np.array(age.ends), np.array(constant.ends))
        for spread, (_, age, constant) in zip(spreads, pairs, strict=True)
    ]
    mean = float(np.mean([one.value for one in estimates]))
    error = math.sqrt(sum(float(one.error) ** 2 for one in estimates)) / len(estimates)
    matters = "matters" if abs(mean) > 2.0 * error else "is not seen to matter"
    return (
        f"- **Whether age is counted or a constant takes its place {matters}:** by age less the constant is "
        f"{_signed(mean)} ± {error:.3f} (standard error) over {len(pairs)} pairs. Samples are younger than the lag "
        "allows, so by age the steps are larger in the mean."
    )


def _pairs(table: RobustTable, ours: str, theirs: str) -> Sequence[tuple[Place, Score, Score]]:
    """Cells where both arms were run themselves, with their scores."""
    rows = table.scores.get(ours, {}), table.scores.get(theirs, {})
    cells = [cell for cell in table.cells if all(cell in row and not row[cell].stands_in for row in rows)]
    return [(cell, rows[0][cell], rows[1][cell]) for cell in cells]


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("0.", ".")


def _p(p: float) -> str:
    return f"{p:.3f}".removeprefix("0") if p >= 0.001 else "< .001"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 when a cell failed otherwise than by diverging."""
    options = _parse(arguments)
    try:
        matrix = read_matrix(MATRIX)
        cells = {name: list(cells_of(matrix, name, options.root)) for name in matrix.experiments}
        failed = False
        for name, experiment in matrix.experiments.items():
            wanted = [one for one in cells[name] if options.only in one.name and one.seed <= options.seeds]
            wanted = unmeasured(results_file(KEPT, name), wanted)
            if not options.page and wanted:
                check_unchanged(wanted)
                failed = run_cells(matrix, experiment, wanted, options.jobs) or failed
            keep(results_file(KEPT, name), cells[name], experiment.series, SETTLED)
        write_page(matrix, load_results(matrix, KEPT), KEPT / "robust.md")
    except EvenKeelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return int(failed)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.evidence.robust", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--page", action="store_true", help="run nothing")
    parser.add_argument("--seeds", type=int, default=99, help="the first so many (1: the screen; default: all)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cells whose name has this in it")
    parser.add_argument("--jobs", type=int, default=2, help="cells beside one another, one core each (default 2)")
    parser.add_argument("--root", type=Path, default=REPOSITORY / "runs" / "robust", help="where run directories live")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
