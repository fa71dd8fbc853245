"""Every arm of robust.yaml in every cell: what it ends at, and its share of the best arm there.

An arm that is another one without lag was not run in the fresh cells: the other one's runs stand there (`stand_in`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np

from tests.evidence.matrix import Matrix
from tests.evidence.results import Arm, Result, load
from tests.evidence.statistics import Spread

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
        each = " ".join(map(two, self.ends))
        return "= " * self.stands_in + (f"{self.mean:.2f} ({each})" if len(self.ends) > 1 else each)


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
