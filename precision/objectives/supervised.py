"""Maximum likelihood on demonstrations: the warm-up before reinforcement learning.

loss = -1/N sum_t A_t log pi(y_t),   A_t = 1 for plain cross-entropy
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from precision.objectives.base import StepContext, TokenBatch, Unscored
from precision.objectives.tokens import response_values, score_function_loss, token_sum


@dataclass(frozen=True, kw_only=True)
class Supervised(Unscored):
    """`advantages` weigh tokens; `rollout_logprobs` are not read: nobody sampled a demonstration.

    Sums: `nll` (-log pi, unweighted).
    """

    def __call__(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and sums of one micro-batch; see `Objective`.

        Raises FloatingPointError when a logprob or an advantage under the mask is not finite.
        """
        loss = score_function_loss(logprobs, batch, context)
        return loss, {"nll": token_sum(-response_values(logprobs, batch.mask, "logprobs"), batch.mask)}
