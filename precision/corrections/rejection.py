"""Rejection: drop what the engine sampled too differently, weigh nothing (`rs` in verl's and slime's options).

factor = 1 if low <= k <= high and the response is not vetoed, else 0
"""

from __future__ import annotations

from typing import Literal

from precision.corrections.engine_ratios import Level, RatioRange, Veto, kept_tokens, measured, mismatch_ratios
from precision.objectives.base import ScoredStep
from precision.torch_on_use import Tensor


class Rejection(RatioRange):
    """log k is clamped to +-20 before it is compared with the bounds, not for the veto.

    Measured: `correction_factor` (mean), `correction_masked_positive` and `_negative` (share of all tokens that are
    dropped, by sign of A).
    """

    name: Literal["rejection"] = "rejection"
    level: Level = "token"
    veto: Veto = 0.0

    def factor(self, step: ScoredStep) -> tuple[Tensor, dict[str, float]]:
        """See `Correction.factor`."""
        kept = kept_tokens(step, mismatch_ratios(step, self.level), self.low, self.high, self.veto)
        factor = kept.double()
        return factor, measured(step, factor, "masked", ~kept)
