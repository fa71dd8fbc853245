"""DPPO with a total-variation trust region (arXiv 2602.04879, binary TV), in the form of prime-rl's default loss.

    loss = 1/N sum_t { -m_t rho_t A_t + square_coefficient (log rho_t)^2 },   rho_t = pi(y_t) / pi_b(y_t)
    m_t = 0 where A_t > 0 and pi - pi_b > threshold, or A_t < 0 and pi - pi_b < -threshold;   1 elsewhere

with pi_b the engine that sampled y_t. |pi - pi_b| is the total variation between the two policies when each token is
only told apart from all others. Unlike a ratio it hardly moves for rare tokens, where numerics alone make ratios large,
and it sees a likely token that loses half its probability. rho is not capped. The square keeps a pull on all tokens,
the masked ones too; it comes from Kimi K2.5 (arXiv 2602.02276), as prime-rl's source says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from precision.objectives.base import StepContext, TokenBatch, Unscored
from precision.objectives.tokens import response_values, rollout_k3, step_mean, token_sum
from precision.ratios import masked_log_ratios


@dataclass(frozen=True, kw_only=True)
class DPPOTV(Unscored):
    """`threshold` .2 (of 1, a difference of probabilities) and `square_coefficient` 1e-3 are prime-rl's defaults.

    Sums: `clip_hits_high` (A > 0, probability risen past the threshold), `clip_hits_low` (A < 0, fallen), `clip_hits`
    (both), `square` ((log rho)^2, before its coefficient), `k3`. Raises ValueError for values out of range.
    """

    threshold: float = 0.2
    square_coefficient: float = 1e-3

    def __post_init__(self) -> None:
        if not (0.0 < self.threshold <= 1.0):
            raise ValueError(
                f"threshold is {self.threshold}, expected a difference of probabilities in (0, 1]; prime-rl's is .2"
            )
        if not (math.isfinite(self.square_coefficient) and self.square_coefficient >= 0.0):
            raise ValueError(
                f"square_coefficient is {self.square_coefficient}, expected a finite number of at least 0; prime-rl's "
                "is 1e-3"
            )

    def __call__(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and sums of one micro-batch; see `Objective`.

        Raises FloatingPointError when a log-ratio or an advantage under the mask is not finite.
        """
        mask = batch.mask
        log_ratios, ratios = masked_log_ratios(logprobs, batch.rollout_logprobs, mask)
        advantages = response_values(batch.advantages, mask, "advantages")
        sampler = response_values(batch.rollout_logprobs, mask, "rollout_logprobs")
        change = sampler.exp() * (ratios.detach() - 1.0)
        high = (change > self.threshold) & (advantages > 0)
        low = (change < -self.threshold) & (advantages < 0)
        squares = log_ratios.square()
        policy = torch.where(high | low, 0.0, -ratios * advantages)
        sums = {
            "clip_hits": token_sum(high | low, mask),
            "clip_hits_high": token_sum(high, mask),
            "clip_hits_low": token_sum(low, mask),
            "square": token_sum(squares, mask),
            "k3": rollout_k3(logprobs, batch),
        }
        return step_mean(policy + self.square_coefficient * squares, mask, context), sums
