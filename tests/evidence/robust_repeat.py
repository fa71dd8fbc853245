"""How much of the table of robust.yaml would come out again: every cell drawn anew around what was measured there.

    mean of an arm in a cell  ~  N(measured mean, s² / n),  between 0 and 1

with s the run-to-run standard deviation pooled within that cell and n the arm's runs there. Arms that are one arm in a
cell share its draw. The measured means are taken for the truth, so the best arm of a cell, which is the largest of many
noisy numbers, is counted high: the chances err on the low side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from tests.evidence.robust_table import BAR, Place, RobustTable, stand_in
from tests.evidence.statistics import Array, Spread

REPEATS = 10_000


@dataclass(frozen=True)
class Repeats:
    """Of every arm that was measured in all cells, as shares of the repetitions."""

    passes: Mapping[str, float]
    """How often it reaches the bar in every cell."""
    first: Mapping[str, float]
    """How often no arm does better in its worst cell; among equals the mean over cells decides."""

    @classmethod
    def of(cls, table: RobustTable) -> Self | None:
        """None where the scatter of some cell is not known, or where no arm is whole."""
        spreads = {cell: table.spread(cell) for cell in table.cells}
        if not table.whole or any(spread.df < 1 for spread in spreads.values()):
            return None
        rng = np.random.default_rng(0)
        shares = [_shares(table, cell, spread, rng) for cell, spread in spreads.items()]
        every = np.stack(shares)  # [cells, arms, repeats]
        worst = every.min(axis=0)
        winner = (worst + 1e-9 * every.mean(axis=0)).argmax(axis=0)
        return cls(
            passes={arm: float((worst[at] >= BAR).mean()) for at, arm in enumerate(table.whole)},
            first={arm: float((winner == at).mean()) for at, arm in enumerate(table.whole)},
        )


def _shares(table: RobustTable, cell: Place, spread: Spread, rng: np.random.Generator) -> Array:
    """[arms of table.whole, repeats] share of the best of all arms in one cell."""
    drawn: dict[str, Array] = {}
    for arm, row in table.scores.items():
        if cell in row and not row[cell].stands_in:
            error = float(spread.sd) / math.sqrt(len(row[cell].ends))
            drawn[arm] = np.clip(row[cell].mean + error * rng.standard_normal(REPEATS), 0.0, 1.0)
    best = np.maximum(np.stack([*drawn.values()]).max(axis=0), 1e-9)
    runs = [stand_in(arm) if table.scores[arm][cell].stands_in else arm for arm in table.whole]
    return np.stack([drawn[run] / best for run in runs])
