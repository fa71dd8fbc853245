"""MIS: masked importance sampling, rejection that weighs what it keeps by k (slime's `mis` example, whose published
setting this is with `veto` 1e-4 and `normalized`; verl's `rollout_is` with `rollout_rs`).

    factor = k if low <= k <= high and the response is not vetoed, else 0
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precision.corrections.engine_ratios import Level, measured, mismatch_ratios
from precision.corrections.rejection import Rejection
from precision.objectives.base import ScoredStep


@dataclass(frozen=True, kw_only=True)
class MIS:
    """`low`, `high`, `level` and `veto` as in `Rejection`. `normalized` divides by the mean k of what is kept, over
    tokens at level token and over responses otherwise, so that the correction changes no step size. (What is dropped
    has no part in that mean: else it would be made up for, which is to shrink the denominator.)

    Measured: as `Rejection`. Raises ValueError for bounds out of order.
    """

    low: float = 0.5
    high: float = 2.0
    level: Level = "token"
    veto: float = 0.0
    normalized: bool = False

    def __post_init__(self) -> None:
        self._rejection()

    def __call__(self, step: ScoredStep) -> tuple[Tensor, dict[str, float]]:
        """See `Correction`."""
        ratios = mismatch_ratios(step, self.level)
        kept = self._rejection().keeps(step, ratios)
        factor = torch.where(kept, ratios, 0.0)
        if self.normalized:
            factor = factor / self._mean_kept(step, factor)
        return factor, measured(step, factor, "masked", ~kept)

    def _rejection(self) -> Rejection:
        return Rejection(low=self.low, high=self.high, level=self.level, veto=self.veto)

    def _mean_kept(self, step: ScoredStep, factor: Tensor) -> float:
        """1 when nothing is kept."""
        of_units = factor[step.sampled] if self.level == "token" else step.row_mean(factor)
        kept = of_units[of_units > 0]
        return float(kept.mean()) if kept.numel() else 1.0
