"""MIS: masked importance sampling, rejection that weighs what it keeps by k (slime's `mis` example, whose published
setting this is with `veto` 1e-4, but for the mean; verl's `rollout_is` with `rollout_rs`).

    factor = k if low <= k <= high and the response is not vetoed, else 0
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from precision.corrections.engine_ratios import Level, RatioRange, Veto, kept_tokens, measured, mismatch_ratios
from precision.objectives.base import ScoredStep
from precision.torch_on_use import Tensor, torch


class MIS(RatioRange):
    """`normalized` is not slime's: the mean here is over what is kept, slime's over all tokens, those that its mask
    then rejects among them. And slime's mask shrinks the denominator of the loss, which no factor here does.

    Measured: as `Rejection`.
    """

    name: Literal["mis"] = "mis"
    level: Level = "token"
    veto: Veto = 0.0
    normalized: bool = Field(
        False,
        description="Divide by the mean weight of what is kept, over tokens at level token and over responses "
        "otherwise, so that the correction changes no step size.",
    )

    def factor(self, step: ScoredStep) -> tuple[Tensor, dict[str, float]]:
        """See `Correction.factor`."""
        ratios = mismatch_ratios(step, self.level)
        kept = kept_tokens(step, ratios, self.low, self.high, self.veto)
        factor = torch.where(kept, ratios, 0.0)
        if self.normalized:
            factor = factor / self._mean_kept(step, factor)
        return factor, measured(step, factor, "masked", ~kept)

    def _mean_kept(self, step: ScoredStep, factor: Tensor) -> float:
        """1 when nothing is kept."""
        of_units = factor[step.sampled] if self.level == "token" else step.row_mean(factor)
        kept = of_units[of_units > 0]
        return float(kept.mean()) if kept.numel() else 1.0
