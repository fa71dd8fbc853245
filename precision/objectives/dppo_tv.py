"""DPPO with a total-variation trust region (arXiv 2602.04879, binary TV), as in prime-rl's default loss.

    loss = 1/N sum_t { -m_t rho_t A_t + square_coefficient (log rho_t)^2 },   rho_t = pi(y_t) / pi_b(y_t)
    m_t = 0 where A_t > 0 and pi - pi_b > threshold, or A_t < 0 and pi - pi_b < -threshold;   1 elsewhere

pi_b is the engine that sampled y_t. |pi - pi_b| is the total variation between the two policies when a token is only
distinguished from all others. Unlike a ratio it hardly moves for rare tokens, where numerics alone make ratios large,
and it sees a likely token that loses half its probability. rho is not capped. The square keeps a pull on all tokens,
masked tokens too; it comes from Kimi K2.5 (arXiv 2602.02276), as prime-rl's source states.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from precision.objectives.objective import (
    Aggregation,
    Facts,
    Objective,
    StepContext,
    TokenBatch,
    response_values,
    rollout_k3,
    step_mean,
    token_sum,
)
from precision.ratios import masked_log_ratios
from precision.torch_on_use import Tensor, torch


class DPPOTV(Objective):
    """A trust region on each token's probability. Sums: `clip_hits_high` (A > 0, risen past the threshold),
    `clip_hits_low` (A < 0, fallen), `clip_hits` (both), `square` ((log rho)^2, before its coefficient), `k3`."""

    name: Literal["dppo_tv"] = "dppo_tv"
    threshold: float = Field(
        0.2, gt=0.0, le=1.0, description="Largest change of a token's probability, of 1; .2 in prime-rl."
    )
    square_coefficient: float = Field(1e-3, ge=0.0, description="Weight of (log ratio)²; 1e-3 in prime-rl.")

    paper_aggregation: ClassVar[Aggregation | None] = "token"

    @property
    def facts(self) -> Facts:
        return replace(super().facts, has_term_without_advantage=self.square_coefficient > 0)

    def loss(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        mask = batch.mask
        log_ratios, ratios = masked_log_ratios(logprobs, batch.rollout_logprobs, mask)
        advantages = response_values(batch.advantages, mask, "advantages")
        rollout = response_values(batch.rollout_logprobs, mask, "rollout_logprobs")
        change = rollout.exp() * (ratios.detach() - 1.0)
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
