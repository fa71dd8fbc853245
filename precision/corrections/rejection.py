"""Rejection: drop what the engine sampled too differently, weigh nothing (`rs` in verl's and slime's options).

factor = 1 if low <= k <= high and the response is not vetoed, else 0
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from precision.corrections.engine_ratios import (
    Level,
    check_bounds,
    check_veto,
    measured,
    mismatch_ratios,
    vetoed,
)
from precision.objectives.base import ScoredStep


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """`level` says whose k is held to [low, high]: the token's, its response's product, or its response's geometric
    mean, which does not depend on length and wants bounds close to 1 (.999 and 1.001 in verl, .9999 and 1.0001 in
    slime). `veto`: a response with any token's k below it is dropped whole (slime: 1e-4; 0 turns it off).

    log k is clamped to +-20 before it is compared with the bounds, not for the veto. Measured: `correction_factor`
    (mean), `correction_masked_positive` and `_negative` (share of all tokens that are dropped, by sign of A). Raises
    ValueError for bounds out of order.
    """

    low: float = 0.5
    high: float = 2.0
    level: Level = "sequence"
    veto: float = 0.0

    def __post_init__(self) -> None:
        check_bounds(self.low, self.high, ".5 and 2 are usual, .999 and 1.001 for level geometric")
        check_veto(self.veto)

    def __call__(self, step: ScoredStep) -> tuple[Tensor, dict[str, float]]:
        """See `Correction`."""
        kept = self.keeps(step, mismatch_ratios(step, self.level))
        factor = kept.double()
        return factor, measured(step, factor, "masked", ~kept)

    def keeps(self, step: ScoredStep, ratios: Tensor) -> Tensor:
        """bool [tokens], from `ratios` (k) at this level."""
        return (self.low <= ratios) & (ratios <= self.high) & ~vetoed(step, self.veto)
