"""The clipped surrogate of PPO (arXiv 1707.06347, Eq. 7) over tokens, as GRPO (arXiv 2402.03300) uses it, with DAPO's
separate upper bound and token-level mean (arXiv 2503.14476).

    loss = -1/N sum_t min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)

The minimum is pessimistic: only A > 0 with rho above and A < 0 with rho below lose their gradient. A token with A < 0
and a large rho is never clipped, and its gradient grows with rho, unless `dual_clip` bounds it (arXiv 1912.09729):
where A < 0 the term is max(min(...), dual_clip A).
"""

from __future__ import annotations

from abc import ABC
from typing import ClassVar, Literal

from pydantic import Field

from precision.measures import CLIPPED_TOKENS, Measure
from precision.objectives.base import Objective, Prepared, ScoredStep, StepContext, TokenBatch
from precision.objectives.tokens import response_values, rollout_k3, step_mean, token_sum
from precision.ratios import masked_log_ratios
from precision.torch_on_use import Tensor, torch


class Anchored(Objective, ABC):
    """An objective that clips around a policy of choice."""

    anchor: Literal["rollout", "old"] = Field(
        "rollout",
        description="What the ratio divides by. rollout: the engine's probability, so that the clip sees the engine's "
        "mismatch too. old: the learner's own probability before the batch's first update, or before its stage (pi_old "
        "of verl and slime); the engine's mismatch is then left to `correction`, and the clip acts from the second "
        "update on (learner.updates_per_batch, or a staged schedule).",
    )

    may_drop_responses: ClassVar[bool] = True

    @property
    def needs_old_logprobs(self) -> bool:
        return self.anchor == "old"

    @property
    def clips_by_old_ratio(self) -> bool:
        return self.anchor == "old"

    @property
    def weighs_by_rollout_ratio(self) -> bool:
        return self.anchor == "rollout"


def prepared_anchor(batch: TokenBatch) -> Tensor:
    """`batch.anchor_logprobs`. Raises ValueError when the step was not prepared."""
    if batch.anchor_logprobs is None:
        raise ValueError("anchor_logprobs is None, expected [batch, sequence] log-probabilities; call `prepare` first")
    return batch.anchor_logprobs


def clipped_loss(
    logprobs: Tensor,
    batch: TokenBatch,
    context: StepContext,
    *,
    anchor_logprobs: Tensor,
    bounds: tuple[float, float],
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and sums of one micro-batch for rho = pi / anchor and `bounds` = (floor, ceiling) of rho.

    Sums: `clip_hits_high` (A > 0, rho above), `clip_hits_low` (A < 0, rho below), `clip_hits` (both), `dual_clip_hits`
    (A < 0, rho above `dual_clip`; only where that is set) and `k3` (against the engine, whatever the anchor). Raises
    FloatingPointError when a log-ratio or an advantage under the mask is not finite.
    """
    mask = batch.mask
    _, ratios = masked_log_ratios(logprobs, anchor_logprobs, mask)
    advantages = response_values(batch.advantages, mask, "advantages")
    surrogate = torch.minimum(ratios * advantages, ratios.clamp(*bounds) * advantages)
    high = (ratios > bounds[1]) & (advantages > 0)
    low = (ratios < bounds[0]) & (advantages < 0)
    sums = {
        "clip_hits": token_sum(high | low, mask),
        "clip_hits_high": token_sum(high, mask),
        "clip_hits_low": token_sum(low, mask),
        "k3": rollout_k3(logprobs, batch),
    }
    if dual_clip is not None:
        bounded = (ratios > dual_clip) & (advantages < 0)
        surrogate = torch.where(bounded, dual_clip * advantages, surrogate)
        sums["dual_clip_hits"] = token_sum(bounded, mask)
    return step_mean(-surrogate, mask, context), sums


class Clipped(Anchored):
    """Sums: see `clipped_loss`."""

    name: Literal["clipped"] = "clipped"
    clip_low: float = Field(0.2, ge=0.0, le=1.0, description="The ratio's floor is 1 - clip_low.")
    clip_high: float = Field(0.2, ge=0.0, description="The ratio's ceiling is 1 + clip_high; DAPO .28.")
    dual_clip: float | None = Field(
        None, gt=1.0, description="Largest ratio that counts where the advantage is negative; dual-clip PPO 3."
    )

    measures: ClassVar[tuple[Measure, ...]] = (CLIPPED_TOKENS,)

    @property
    def needs_scoring(self) -> bool:
        return self.anchor == "old"

    @property
    def reads_step_logprobs(self) -> bool:
        return False

    def prepare(self, step: ScoredStep) -> Prepared:
        """The learner's policy at the start of the stage becomes the anchor."""
        return Prepared(advantages=step.advantages, anchor_logprobs=step.old_logprobs)

    def loss(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Objective.loss`."""
        return clipped_loss(
            logprobs,
            batch,
            context,
            anchor_logprobs=prepared_anchor(batch) if self.anchor == "old" else batch.rollout_logprobs,
            bounds=(1.0 - self.clip_low, 1.0 + self.clip_high),
            dual_clip=self.dual_clip,
        )
