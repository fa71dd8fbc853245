"""The two questions that robust.yaml asks of pairs of arms, and their answers.

Does P3O's cap at the ESS fail under staleness where a cap of 5 does not? Does age have to be counted, or is a smaller
constant as good? Differences of means, with the run-to-run variance pooled within the cell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tests.evidence.robust_table import Place, RobustTable, Score, two
from tests.evidence.statistics import ALPHA, holm


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
