"""The clipped surrogate of PPO (arXiv 1707.06347, Eq. 7) over tokens, as GRPO (arXiv 2402.03300) uses it, with DAPO's
separate upper bound and token-level mean (arXiv 2503.14476).

    loss = -1/N sum_t min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)

The minimum is pessimistic: only A > 0 with rho above and A < 0 with rho below lose their gradient. A token with A < 0
and a large rho is never clipped, and its gradient grows with rho.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precision.objectives.base import StepContext, TokenBatch
from precision.objectives.tokens import response_values, step_mean, token_sum
from precision.ratios import masked_log_ratios


@dataclass(frozen=True, kw_only=True)
class Clipped:
    """PPO and GRPO: .2 and .2; DAPO: .2 and .28. `clip_low` is in [0, 1], `clip_high` at least 0.

    Sums: `clip_hits_high` (A > 0, rho above), `clip_hits_low` (A < 0, rho below), `clip_hits` (both), `k3` (rho - 1 -
    log rho: KL(sampler || learner)). Raises ValueError for bounds out of range.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        if not (0.0 <= self.clip_low <= 1.0 and self.clip_high >= 0.0):
            raise ValueError(
                f"clip_low is {self.clip_low} and clip_high {self.clip_high}; expected clip_low in [0, 1] and "
                "clip_high >= 0; .2 and .2 are PPO's"
            )

    @property
    def needs_step_ess(self) -> bool:
        return False

    def __call__(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and sums of one micro-batch; see `Objective`.

        Raises FloatingPointError when a log-ratio or an advantage under the mask is not finite.
        """
        mask = batch.mask
        log_ratios, ratios = masked_log_ratios(logprobs, batch.sampler_logprobs, mask)
        advantages = response_values(batch.advantages, mask, "advantages")
        floor, ceiling = 1.0 - self.clip_low, 1.0 + self.clip_high
        surrogate = torch.minimum(ratios * advantages, ratios.clamp(floor, ceiling) * advantages)
        high = (ratios > ceiling) & (advantages > 0)
        low = (ratios < floor) & (advantages < 0)
        sums = {
            "clip_hits": token_sum(high | low, mask),
            "clip_hits_high": token_sum(high, mask),
            "clip_hits_low": token_sum(low, mask),
            "k3": token_sum(torch.expm1(log_ratios) - log_ratios, mask),
        }
        return step_mean(-surrogate, mask, context), sums
