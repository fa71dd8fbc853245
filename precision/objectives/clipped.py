"""Objectives that clip a ratio: PPO's surrogate (`clipped`), decoupled PPO and GSPO.

The clipped surrogate of PPO (arXiv 1707.06347, Eq. 7) is over tokens, as in GRPO (arXiv 2402.03300), with DAPO's
separate upper bound and token-level mean (arXiv 2503.14476):

    loss = -1/N sum_t min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)

The minimum is pessimistic: only A > 0 with rho above and A < 0 with rho below lose their gradient. A token with A < 0
and a large rho is never clipped, and its gradient grows with rho, unless `dual_clip` bounds it (arXiv 1912.09729):
where A < 0 the term is max(min(...), dual_clip A).
"""

from __future__ import annotations

from abc import ABC
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from precision.objectives.objective import (
    Aggregation,
    Facts,
    Objective,
    Prepared,
    ScoredStep,
    StepContext,
    TokenBatch,
    response_values,
    rollout_k3,
    sampled_mean,
    scaled_advantages,
    score_function_loss,
    step_mean,
    token_sum,
)
from precision.ratios import masked_log_ratios, require_usable
from precision.torch_on_use import Tensor, torch


class Anchored(Objective, ABC):
    """Base of the objectives that clip around a policy of choice."""

    anchor: Literal["rollout", "old"] = Field(
        "rollout",
        description="What the ratio divides by. rollout: the engine's probability, so that the clip sees the engine's "
        "mismatch too. old: the learner's own probability before the batch's first update, or before its stage (pi_old "
        "of verl and slime); the engine's mismatch is then left to `correction`, and the clip acts from the second "
        "update on (learner.updates_per_batch, or a staged schedule).",
    )

    may_drop_responses: ClassVar[bool] = True

    @property
    def facts(self) -> Facts:
        old = self.anchor == "old"
        return replace(super().facts, needs_old_logprobs=old, clips_by_old_ratio=old, weighs_by_rollout_ratio=not old)


def prepared_anchor(batch: TokenBatch) -> Tensor:
    """Return `batch.anchor_logprobs`. Raises ValueError when the step was not prepared."""
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
    """Return loss and sums of one micro-batch for rho = pi / anchor and `bounds` = (floor, ceiling) of rho. Sums:
    `clip_hits_high` (A > 0, rho above), `clip_hits_low` (A < 0, rho below), `clip_hits` (both), `dual_clip_hits` (A <
    0, rho above `dual_clip`; only where that is set) and `k3` (against the engine, whatever the anchor). Raises
    FloatingPointError when a log-ratio or an advantage under the mask is not finite."""
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
    """PPO's clipped surrogate over tokens. Sums: see `clipped_loss`."""

    name: Literal["clipped"] = "clipped"
    clip_low: float = Field(0.2, ge=0.0, le=1.0, description="The ratio's floor is 1 - clip_low.")
    clip_high: float = Field(0.2, ge=0.0, description="The ratio's ceiling is 1 + clip_high; DAPO .28.")
    dual_clip: float | None = Field(
        None, gt=1.0, description="Largest ratio that counts where the advantage is negative; dual-clip PPO 3."
    )

    @property
    def facts(self) -> Facts:
        return replace(super().facts, needs_scoring=self.anchor == "old", reads_step_logprobs=False)

    def prepare(self, step: ScoredStep) -> Prepared:
        """Make the learner's policy at the start of the stage the anchor."""
        return Prepared(advantages=step.advantages, anchor_logprobs=step.old_logprobs)

    def loss(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        return clipped_loss(
            logprobs,
            batch,
            context,
            anchor_logprobs=prepared_anchor(batch) if self.anchor == "old" else batch.rollout_logprobs,
            bounds=(1.0 - self.clip_low, 1.0 + self.clip_high),
            dual_clip=self.dual_clip,
        )


class Decoupled(Objective):
    """Decoupled PPO: the clip is around the learner's own recent policy, not around the policy that sampled (arXiv
    2110.00641; for language models AReaL, arXiv 2505.24298).

        loss = -1/N sum_t sg(b_t) min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)
        b_t = pi_old(y_t) / pi_b(y_t),   r_t = pi(y_t) / pi_old(y_t)

    pi_b is the engine that sampled y_t, pi_old the learner before the first of several updates (on a batch, in a
    stage), or at the version that sampled (learner.old_logprobs_at), and sg stop-gradient. Staleness and the engine's
    other numerics then weigh a token, and do not use up the room of the clip. With a single update, and pi_old the
    policy before it, r is 1: only the importance weight b is left, and the clip never acts. Dropped tokens stay in N.
    Measured: `cap_hits` (share of tokens with b above the cap), `weight` (mean of b as used). Sums: see `clipped_loss`.
    """

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

    @property
    def facts(self) -> Facts:
        return replace(super().facts, needs_old_logprobs=True, reads_step_logprobs=False, clips_by_old_ratio=True)

    def prepare(self, step: ScoredStep) -> Prepared:
        """Make b a factor on the advantages, and pi_old the anchor. Raises as `Objective.prepare`."""
        behavior = step.log_ratios(step.old_logprobs, step.rollout_logprobs).exp()
        over = behavior > self.mismatch_cap
        weights = torch.where(over, 0.0 if self.over_cap == "mask" else self.mismatch_cap, behavior)
        return Prepared(
            advantages=scaled_advantages(step, weights),
            anchor_logprobs=step.old_logprobs,
            measured={"cap_hits": sampled_mean(step, over), "weight": sampled_mean(step, weights)},
        )

    def loss(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        return clipped_loss(
            logprobs,
            batch,
            context,
            anchor_logprobs=prepared_anchor(batch),
            bounds=(1.0 - self.clip_low, 1.0 + self.clip_high),
        )


class GSPO(Anchored):
    """A ratio, and a clip, of whole responses (arXiv 2507.18071, Eq. 5 to 7).

        J = mean over responses i of min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i),
        s_i = (pi(y_i) / pi_anchor(y_i))^(1 / |y_i|) = exp(mean_t log r_it)

    The gradient of an unclipped s_i A_i is s_i A_i mean_t grad log pi(y_it); that of a clipped term is 0. Both s_i and
    whether it is clipped are known once the step is scored, before its first micro-batch. So they become a factor on
    the advantage, s_i or 0, of the score-function loss

        loss = -1/N sum_it (factor_i A_it) log pi(y_it)

    which has the paper's gradient (not its value) in any layout, and takes token-wise advantages as the paper's
    GSPO-token does. The bounds are a few 1e-4 wide, less than rounding in bfloat16 moves a single log-probability
    between two passes: a clip decided anew on each token of the training pass would decide by noise.

    This is the mean over tokens. The paper's mean over R responses arises from advantages that carry the factor N / (R
    |y_i|), by advantage.aggregation `sequence`, the default with this objective. Measured, as shares of tokens:
    `clip_hits_high` (A > 0, s above), `clip_hits_low` (A < 0, s below), `clip_hits` (both); `weight` (mean factor).
    Sums: `k3` (against the engine, token by token).
    """

    name: Literal["gspo"] = "gspo"
    anchor: Literal["rollout", "old"] = Field(
        "old",
        description="Denominator of s. old: the learner's own probability before the batch's first update, or before "
        "its stage, as in the paper; the clip acts from the second update on. rollout: the engine's probability. For "
        "sampled tokens log s is then near -KL to the engine, not 0: in BF16 or FP8 often below the floor, so that "
        "most responses with A < 0 are clipped before anything is learned.",
    )
    clip_low: float = Field(3e-4, ge=0.0, le=1.0, description="The floor of s is 1 - clip_low; 3e-4 is the paper's.")
    clip_high: float = Field(
        4e-4, ge=0.0, description="The ceiling of s is 1 + clip_high; 4e-4 is the paper's, ScaleRL needed 4e-3 to 5e-3."
    )

    paper_aggregation: ClassVar[Aggregation | None] = "sequence"

    def prepare(self, step: ScoredStep) -> Prepared:
        """Make sequence ratios and clips factors on the advantages. Raises as `Objective.prepare`."""
        anchor = step.old_logprobs if self.anchor == "old" else step.rollout_logprobs
        log_ratios = step.row_mean(step.log_ratios(step.logprobs, anchor))
        require_usable(log_ratios, lambda: f"of {len(step.offsets) - 1} responses")
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
        return score_function_loss(logprobs, batch, context), {"k3": rollout_k3(logprobs, batch)}
