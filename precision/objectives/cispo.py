"""CISPO: the importance weight is truncated, the gradient never is (MiniMax-M1, arXiv 2506.13585), in the form that
ScaleRL uses (arXiv 2510.13786, recipe: J).

    loss = -1/N sum_t sg(min(rho_t, cap)) A_t log pi(y_t),   rho_t = pi(y_t) / pi_b(y_t)

with pi the learner, pi_b the engine that sampled y_t, and sg stop-gradient. Unlike PPO's clip no token loses its
gradient; a token that grew likelier than `cap` times merely stops gaining weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from precision.objectives.base import StepContext, TokenBatch, Unscored
from precision.objectives.tokens import response_values, step_mean, token_sum
from precision.ratios import masked_log_ratios


@dataclass(frozen=True, kw_only=True)
class CISPO(Unscored):
    """`cap` of 4, 5 and 8 made no difference to ScaleRL; 5 is its middle. At least 1, so that exactly on-policy tokens
    keep their weight. (In slime `--eps-clip-high 4` is this cap 5.)

    Sums: `cap_hits` (tokens with rho > cap), `weight` (min(rho, cap)), `k3` (rho - 1 - log rho). Raises ValueError for
    a cap out of range.
    """

    cap: float = 5.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.cap) and self.cap >= 1.0):
            raise ValueError(f"cap is {self.cap}, expected a finite number of at least 1; ScaleRL's is 5")

    def __call__(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and sums of one micro-batch; see `Objective`.

        Raises FloatingPointError when a log-ratio or an advantage under the mask is not finite.
        """
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
