"""TOPR: tapered off-policy REINFORCE (arXiv 2503.14286).

    gradient of J = sum over responses i of w_i A_i grad log pi(y_i),
    w_i = 1 where A_i >= 0,   clip(pi(y_i) / pi_b(y_i), clip_low, clip_high) where A_i < 0

A success is learned whatever its probability is by now, as in supervised learning. A failure loses weight as the
learner leaves it, so that its probability is not driven towards 0 for ever. The ratio is that of the whole response, a
product over its tokens, taken in logs; long responses, or an engine of other precision, make it fall far below 1.

    loss = -1/N sum_it (w_i A_it) log pi(y_it)

As in the paper log pi is summed over a response, up to the factor 1/N common to the step. advantage.aggregation
`constant`, the default with this objective, makes that factor the same in every step of as many samples.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from precision.objectives.objective import (
    Aggregation,
    Objective,
    Prepared,
    ScoredStep,
    StepContext,
    TokenBatch,
    rollout_k3,
    sampled_mean,
    scaled_advantages,
    score_function_loss,
)
from precision.torch_on_use import Tensor, torch


class TOPR(Objective):
    """Tapered off-policy REINFORCE. Measured: `cap_hits` (share of tokens in failed responses with a ratio above
    `clip_high`), `weight` (mean w over tokens). Sums: `k3`."""

    name: Literal["topr"] = "topr"
    clip_low: float = Field(0.0, ge=0.0, description="Smallest weight of a failed response; 0 is the paper's.")
    clip_high: PositiveFloat = Field(1.0, description="Largest weight of a failed response; 1 is the paper's.")

    paper_aggregation: ClassVar[Aggregation | None] = "constant"

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.clip_low > self.clip_high:
            raise ValueError(f"clip_low {self.clip_low} is above clip_high {self.clip_high}; lower it")
        return self

    def prepare(self, step: ScoredStep) -> Prepared:
        """Make the weights of whole responses factors on the advantages. Raises as `Objective.prepare`."""
        # A product over a long response may overflow to infinity, which the cap takes in.
        ratios = step.row_sum(step.log_ratios(step.logprobs, step.rollout_logprobs)).exp()[step.row]
        failed = step.advantages < 0
        weights = torch.where(failed, ratios.clamp(self.clip_low, self.clip_high), 1.0)
        return Prepared(
            advantages=scaled_advantages(step, weights),
            measured={
                "cap_hits": sampled_mean(step, failed & (ratios > self.clip_high)),
                "weight": sampled_mean(step, weights),
            },
        )

    def loss(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        return score_function_loss(logprobs, batch, context), {"k3": rollout_k3(logprobs, batch)}
