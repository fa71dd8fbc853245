"""Define maximum likelihood on demonstrations, for sft before reinforcement learning.

loss = -1/N sum_t A_t log pi(y_t),   A_t = 1 for plain cross-entropy
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from precision.objectives.objective import (
    Facts,
    Objective,
    StepContext,
    TokenBatch,
    response_values,
    score_function_loss,
    token_sum,
)
from precision.torch_on_use import Tensor


class Supervised(Objective):
    """Maximum likelihood on demonstrations. `evenkeel sft` trains with it; no recipe chooses it by name. `advantages`
    weigh tokens; `rollout_logprobs` are not read: nobody sampled them. Sums: `nll` (-log pi, unweighted)."""

    name: Literal["supervised"] = "supervised"

    @property
    def facts(self) -> Facts:
        return replace(super().facts, weighs_by_rollout_ratio=False)

    def loss(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        loss = score_function_loss(logprobs, batch, context)
        return loss, {"nll": token_sum(-response_values(logprobs, batch.mask, "logprobs"), batch.mask)}
