"""Decoupled PPO: the clip is around the learner's own recent policy, not around the one that sampled (arXiv 2110.00641;
for language models AReaL, arXiv 2505.24298).

    loss = -1/N sum_t sg(b_t) min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)
    b_t = pi_old(y_t) / pi_b(y_t),   r_t = pi(y_t) / pi_old(y_t)

with pi_b the engine that sampled y_t, pi_old the learner before the first of several updates (on a batch, in a stage),
or at the version that sampled (learner.old_logprobs_at), and sg stop-gradient. Staleness and the engine's other
numerics then weigh a token, and do not use up the room of the clip. With a single update, and pi_old the policy before
it, r is 1: what is left is the importance weight b, and the clip never acts.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from precision.measures import CAPPED_TOKENS, CLIPPED_TOKENS, MEAN_WEIGHT, Measure
from precision.objectives.base import Objective, Prepared, ScoredStep, StepContext, TokenBatch
from precision.objectives.clipped import clipped_loss, prepared_anchor
from precision.objectives.tokens import sampled_mean, scaled_advantages
from precision.torch_on_use import Tensor, torch


class Decoupled(Objective):
    """Dropped tokens stay in N. Measured: `cap_hits` (share of tokens with b above the cap), `weight` (mean of b as it
    was used). Sums: see `clipped_loss`."""

    name: Literal["decoupled"] = "decoupled"
    clip_low: float = Field(0.2, ge=0.0, le=1.0, description="The floor of r is 1 - clip_low.")
    clip_high: float = Field(0.2, ge=0.0, description="The ceiling of r is 1 + clip_high.")
    mismatch_cap: float = Field(
        5.0,
        ge=1.0,
        description="Largest pi_old / pi_engine that counts as it is; 5 was the default of AReaL's code.",
    )
    over_cap: Literal["mask", "truncate"] = Field(
        "mask", description="Above mismatch_cap, mask drops a token (AReaL); truncate gives it the weight mismatch_cap."
    )

    measures: ClassVar[tuple[Measure, ...]] = (CLIPPED_TOKENS, CAPPED_TOKENS, MEAN_WEIGHT)

    @property
    def needs_old_logprobs(self) -> bool:
        return True

    @property
    def reads_step_logprobs(self) -> bool:
        return False

    @property
    def clips_by_old_ratio(self) -> bool:
        return True

    def prepare(self, step: ScoredStep) -> Prepared:
        """b becomes a factor on the advantages, pi_old the anchor. Raises as `Objective.prepare`."""
        behavior = step.log_ratios(step.old_logprobs, step.rollout_logprobs).exp()
        over = behavior > self.mismatch_cap
        weights = torch.where(over, 0.0 if self.over_cap == "mask" else self.mismatch_cap, behavior)
        return Prepared(
            advantages=scaled_advantages(step, weights),
            anchor_logprobs=step.old_logprobs,
            measured={"cap_hits": sampled_mean(step, over), "weight": sampled_mean(step, weights)},
        )

    def loss(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Objective.loss`."""
        return clipped_loss(
            logprobs,
            batch,
            context,
            anchor_logprobs=prepared_anchor(batch),
            bounds=(1.0 - self.clip_low, 1.0 + self.clip_high),
        )
