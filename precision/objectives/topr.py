"""TOPR: tapered off-policy REINFORCE (arXiv 2503.14286).

    gradient of J = sum over responses i of w_i A_i grad log pi(y_i),
    w_i = 1 where A_i >= 0,   clip(pi(y_i) / pi_b(y_i), clip_low, clip_high) where A_i < 0

A success is learned whatever its probability is by now, as in supervised learning. A failure loses weight as the
learner leaves it, so that its probability is not driven towards 0 for ever. The ratio is that of the whole response, a
product over its tokens, taken in logs; long responses, or a sampler of other precision, make it fall far below 1.

    loss = -1/N sum_it (w_i A_it) log pi(y_it)

As in the paper log pi is summed over a response, up to the factor 1/N common to the step; the recipe's
advantage.aggregation `constant` makes that factor the same in every step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from precision.objectives.base import Prepared, ScoredStep, StepContext, TokenBatch
from precision.objectives.tokens import rollout_k3, sampled_mean, scaled_advantages, score_function_loss


@dataclass(frozen=True, kw_only=True)
class TOPR:
    """`clip_low` 0 and `clip_high` 1 are the paper's recommendation for failures.

    Measured: `cap_hits` (share of tokens in failed responses with a ratio above `clip_high`), `weight` (mean w over
    tokens). Sums: `k3`. Raises ValueError for bounds out of range.
    """

    clip_low: float = 0.0
    clip_high: float = 1.0

    def __post_init__(self) -> None:
        if not (0.0 <= self.clip_low <= self.clip_high and 0.0 < self.clip_high < math.inf):
            raise ValueError(
                f"clip_low is {self.clip_low} and clip_high {self.clip_high}; expected 0 <= clip_low <= clip_high, "
                "clip_high positive and finite; 0 and 1 are TOPR's"
            )

    @property
    def needs_scoring(self) -> bool:
        return True

    def prepare(self, step: ScoredStep) -> Prepared:
        """Weights of whole responses as factors on the advantages. Raises FloatingPointError on a log-ratio that is not
        finite."""
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

    def __call__(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and sums of one micro-batch; see `Objective`.

        Raises FloatingPointError when a log-ratio or an advantage under the mask is not finite.
        """
        return score_function_loss(logprobs, batch, context), {"k3": rollout_k3(logprobs, batch)}
