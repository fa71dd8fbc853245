"""IcePop: weigh a token by k where engine and learner roughly agree, drop it elsewhere (Ring-1T, arXiv 2510.18855).

    factor = k if low <= k <= high, else 0

Dropped tokens stay in the denominator, as in the paper.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from precision.corrections.engine_ratios import RatioRange, measured, mismatch_ratios
from precision.objectives.base import ScoredStep
from precision.torch_on_use import Tensor, torch


class IcePop(RatioRange):
    """Always token by token. Measured: `correction_factor` (mean), `correction_masked_positive` and `_negative` (share
    of all tokens that are dropped, by sign of A)."""

    name: Literal["icepop"] = "icepop"
    high: PositiveFloat = Field(5.0, description="Largest ratio; .5 and 5 are the paper's alpha and beta.")

    def factor(self, step: ScoredStep) -> tuple[Tensor, dict[str, float]]:
        """See `Correction.factor`."""
        ratios = mismatch_ratios(step, "token")
        kept = (self.low <= ratios) & (ratios <= self.high)
        factor = torch.where(kept, ratios, 0.0)
        return factor, measured(step, factor, "masked", ~kept)
