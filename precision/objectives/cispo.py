"""CISPO: the importance weight is truncated, the gradient never is (MiniMax-M1, arXiv 2506.13585), in the form that
ScaleRL uses (arXiv 2510.13786, recipe: J).

    loss = -1/N sum_t sg(min(rho_t, cap)) A_t log pi(y_t),   rho_t = pi(y_t) / pi_b(y_t)

pi is the learner, pi_b the engine that sampled y_t, and sg stop-gradient. Unlike with PPO's clip no token loses its
gradient; a token that grew likelier than `cap` times merely stops gaining weight.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from precision.objectives.objective import Objective, StepContext, TokenBatch, response_values, step_mean, token_sum
from precision.ratios import masked_log_ratios
from precision.torch_on_use import Tensor


class CISPO(Objective):
    """A truncated importance weight with a full gradient. Sums: `cap_hits` (tokens with rho > cap), `weight` (min(rho,
    cap)), `k3` (rho - 1 - log rho)."""

    name: Literal["cispo"] = "cispo"
    cap: float = Field(
        5.0,
        ge=1.0,
        description="Largest importance weight of a token. 4, 5 and 8 made no difference to ScaleRL; 5 is its middle. "
        "slime's --eps-clip-high 4 is this cap 5.",
    )

    may_drop_responses: ClassVar[bool] = True

    def loss(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        mask = batch.mask
        log_ratios, ratios = masked_log_ratios(logprobs, batch.rollout_logprobs, mask)
        learner = response_values(logprobs, mask, "logprobs")
        advantages = response_values(batch.advantages, mask, "advantages")
        weights = ratios.detach().clamp(max=self.cap)
        sums = {
            "cap_hits": token_sum(ratios > self.cap, mask),
            "weight": token_sum(weights, mask),
            "k3": token_sum(log_ratios.expm1() - log_ratios, mask),
        }
        return step_mean(-weights * advantages * learner, mask, context), sums
