"""IcePop: weigh a token by k where engine and learner roughly agree, drop it elsewhere (Ring-1T, arXiv 2510.18855).

    factor = k if low <= k <= high, else 0

Dropped tokens stay in the denominator, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precision.corrections.engine_ratios import check_bounds, measured, mismatch_ratios
from precision.objectives.base import ScoredStep


@dataclass(frozen=True, kw_only=True)
class IcePop:
    """`low` and `high`: .5 and 5, the paper's alpha and beta. Always token by token.

    Measured: `correction_factor` (mean), `correction_masked_positive` and `_negative` (share of all tokens that are
    dropped, by sign of A). Raises ValueError for bounds out of order.
    """

    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        check_bounds(self.low, self.high, ".5 and 5 are IcePop's")

    def __call__(self, step: ScoredStep) -> tuple[Tensor, dict[str, float]]:
        """See `Correction`."""
        ratios = mismatch_ratios(step, "token")
        kept = (self.low <= ratios) & (ratios <= self.high)
        factor = torch.where(kept, ratios, 0.0)
        return factor, measured(step, factor, "masked", ~kept)
