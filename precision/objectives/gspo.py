"""GSPO: the ratio, and the clip, of a whole response (arXiv 2507.18071, Eq. 5 to 7).

    J = mean over responses i of min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i),
    s_i = (pi(y_i) / pi_anchor(y_i))^(1 / |y_i|) = exp(mean_t log r_it)

The gradient of an unclipped s_i A_i is s_i A_i mean_t grad log pi(y_it); that of a clipped one is 0. Both s_i and
whether it is clipped are known once the step is scored, hence before its first micro-batch. So they become a factor on
the advantage, s_i or 0, of the score-function loss

    loss = -1/N sum_it (factor_i A_it) log pi(y_it)

which has the paper's gradient (not its value) in any layout, and takes token-wise advantages as the paper's GSPO-token
does. The bounds are a few 1e-4 wide, less than rounding in bfloat16 moves a single log-probability between
two passes: a clip decided anew on each token of the training pass would decide by noise.

This is the mean over tokens. The paper's mean over R responses arises from advantages that carry the factor
N / (R |y_i|). advantage.aggregation `sequence` puts it on them; a recipe that sets no aggregation gets that one.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from precision.measures import CLIPPED_TOKENS, MEAN_WEIGHT, Measure
from precision.objectives.base import Aggregation, Prepared, ScoredStep, StepContext, TokenBatch
from precision.objectives.clipped import Anchored
from precision.objectives.tokens import rollout_k3, sampled_mean, scaled_advantages, score_function_loss
from precision.ratios import require_usable
from precision.torch_on_use import Tensor, torch


class GSPO(Anchored):
    """Measured, as shares of tokens: `clip_hits_high` (A > 0, s above), `clip_hits_low` (A < 0, s below), `clip_hits`
    (both); `weight` (mean factor). Sums: `k3` (against the engine, token by token)."""

    name: Literal["gspo"] = "gspo"
    anchor: Literal["rollout", "old"] = Field(
        "old",
        description="What s divides by. old: the learner's own probability before the batch's first update, or before "
        "its stage, as in the paper; the clip acts from the second update on. rollout: the engine's probability. Of "
        "what an engine sampled log s is near -KL to the engine, not 0: in BF16 or FP8 that is often below the floor, "
        "and most responses with A < 0 are clipped before anything was learned.",
    )
    clip_low: float = Field(3e-4, ge=0.0, le=1.0, description="The floor of s is 1 - clip_low; 3e-4 is the paper's.")
    clip_high: float = Field(
        4e-4, ge=0.0, description="The ceiling of s is 1 + clip_high; 4e-4 is the paper's, ScaleRL needed 4e-3 to 5e-3."
    )

    paper_aggregation: ClassVar[Aggregation | None] = "sequence"
    measures: ClassVar[tuple[Measure, ...]] = (CLIPPED_TOKENS, MEAN_WEIGHT)

    def prepare(self, step: ScoredStep) -> Prepared:
        """Sequence ratios and clips become factors on the advantages. Raises as `Objective.prepare`."""
        anchor = step.old_logprobs if self.anchor == "old" else step.rollout_logprobs
        log_ratios = step.row_mean(step.log_ratios(step.logprobs, anchor))
        require_usable(log_ratios, f"of {step.num_rows} responses")
        ratios = log_ratios.exp()[step.row]
        high = (ratios > 1.0 + self.clip_high) & (step.advantages > 0)
        low = (ratios < 1.0 - self.clip_low) & (step.advantages < 0)
        factors = torch.where(high | low, 0.0, ratios)
        return Prepared(
            advantages=scaled_advantages(step, factors),
            measured={
                "clip_hits": sampled_mean(step, high | low),
                "clip_hits_high": sampled_mean(step, high),
                "clip_hits_low": sampled_mean(step, low),
                "weight": sampled_mean(step, factors),
            },
        )

    def loss(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Objective.loss`."""
        return score_function_loss(logprobs, batch, context), {"k3": rollout_k3(logprobs, batch)}
