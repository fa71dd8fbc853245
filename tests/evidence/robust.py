"""docs/evidence/robust.md: which objective never collapses? Every arm of robust.yaml in every cell.

An arm that is another one without lag was not run in the fresh cells: the other one's runs stand there (`stand_in`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np

from pipeline.data.files import write_atomically
from tests.evidence.matrix import Matrix
from tests.evidence.results import Arm, Result
from tests.evidence.statistics import Spread

EARLY = 60
"""The version that every run has an evaluation of: the end of the fresh ones, the middle of the others."""
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
    """Write the page."""
    table, early = RobustTable.of(matrix, results), RobustTable.of(matrix, results, version=EARLY)
    lines = [
        "# One objective that never collapses?",
        "",
        "Written by `python -m tests.evidence robust` from `tests/evidence/robust.yaml`, which lists arms, seeds and "
        f"cells. The bar: one arm ends at {BAR} or more of the best arm in every cell. Small models show mechanisms, "
        "not sizes of effects.",
        "",
        *_answer(table),
        "",
        "## Every arm in every cell",
        "",
        *_cells(matrix, table, early),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "\n".join(lines).rstrip() + "\n")


def _answer(table: RobustTable) -> list[str]:
    """Who passes the bar; what is lacking where that cannot be said yet."""
    if not table.whole:
        return [f"**Not known yet:** no arm has been measured in all {len(table.cells)} cells."]
    passing = [arm for arm, share in table.whole.items() if share >= BAR]
    lines = [f"**{len(passing)} of {len(table.whole)} arms pass the bar.**" + " The nearest:" * (not passing), ""]
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
