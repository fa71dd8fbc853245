"""P3O and its relatives P4O and Split: a capped importance weight and a KL anchor.

P3O is capped and anchored by the effective sample size (arXiv 2605.12380, Eq. 11 and 12):

    loss = 1/N sum_t { -sg(min(rho_t, e)) A_t log pi(y_t) + (1 - e) K_t },   rho_t = pi(y_t) / pi_b(y_t)

pi is the learner, pi_b the engine that sampled y_t, e the ESS of the batch and K an estimator of the anchor KL(pi ||
pi_b) (both in `precision.ratios`), and sg stop-gradient. There is no clip to tune: where the two policies agree e is 1
and this is the plain policy gradient; where they part every weight shrinks and the anchor takes over.

The authors' code (github.com/FeynRL-project/FeynRL) takes the ESS of each micro-batch over all ranks, as `ess_scope:
micro_batch` does. Two things differ from theirs: this ESS has the floor 1 / tokens, which their epsilon undercuts when
all ratios are tiny; and a ratio that is not finite raises, where theirs falls back to an ESS of 1. The paper's
advantages are z-scores within the group. The recipes' `grpo` divides by the sample standard deviation (ddof 1, as
torch.std does); the paper leaves open which is meant.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from precision.objectives.clipped import prepared_anchor
from precision.objectives.objective import (
    Aggregation,
    Facts,
    Objective,
    Prepared,
    ScoredStep,
    StepContext,
    TokenBatch,
    response_values,
    step_mean,
    token_sum,
)
from precision.ratios import (
    ess_from_sums,
    importance_kl,
    masked_log_ratios,
    official_kl,
    sequence_ess_of_totals,
    staleness_ess,
    token_ess,
    with_gradient,
)
from precision.torch_on_use import Tensor, torch


class P3O(Objective):
    """Importance weights capped, and a KL anchor weighed, by the ESS ("Trust the Batch", arXiv 2605.12380, Eq. 11 and
    12). Sums: `cap_hits` (tokens with rho > e), `weight` (min(rho, e)), `kl` (K before its weight), `policy_loss` and
    `kl_loss` (the two terms of the loss), `objective_ess` (e, counted once a token: its mean over the step is the
    token-weighted mean of the micro-batches' ESS)."""

    name: Literal["p3o"] = "p3o"
    ess_scope: Literal["step", "micro_batch"] = Field(
        "step",
        description="step: the ESS of the whole step, from a pass without gradients. micro_batch: that of each "
        "micro-batch over all ranks, as in the authors' code; it depends on learner.micro_batch_tokens.",
    )
    ess_unit: Literal["token", "sequence"] = Field(
        "token",
        description="token is the paper's. sequence takes the ESS of whole responses, whose ratios are products over "
        "their tokens; it falls far faster with length, and needs ess_scope step.",
    )
    kl_estimator: Literal["official", "importance", "none"] = Field(
        "official",
        description="official: the authors' code. importance: the estimator that fits samples from the engine; its "
        "gradient weight is capped at the ESS. none: no anchor, to see what the cap does alone.",
    )

    paper_aggregation: ClassVar[Aggregation | None] = "token"

    @model_validator(mode="after")
    def _responses_are_whole(self) -> Self:
        if self.ess_unit == "sequence" and self.ess_scope != "step":
            raise ValueError(
                f"ess_unit sequence with ess_scope {self.ess_scope}: it needs ess_scope step, as a micro-batch may "
                "hold parts of responses"
            )
        return self

    @property
    def facts(self) -> Facts:
        return replace(
            super().facts,
            needs_scoring=self.ess_scope == "step",
            has_term_without_advantage=self.kl_estimator != "none",
            depends_on_micro_batches=self.ess_scope == "micro_batch",
        )

    def prepare(self, step: ScoredStep) -> Prepared:
        """Compute the step's ESS. Raises FloatingPointError on non-finite log-ratios, ValueError without tokens."""
        log_ratios = step.log_ratios(step.logprobs, step.rollout_logprobs)
        if self.ess_unit == "token":
            ess = token_ess(log_ratios[step.sampled])
        else:
            answered = step.row_sum(step.sampled) > 0
            ess = sequence_ess_of_totals(step.row_sum(log_ratios)[answered])
        return Prepared(advantages=step.advantages, step_ess=ess)

    def loss(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratios, ratios = masked_log_ratios(logprobs, batch.rollout_logprobs, batch.mask)
        if self.ess_scope == "step":
            ess = checked_ess(context.step_ess)
        else:
            terms = (ratios.detach(), ratios.detach().double().square(), batch.mask)
            sums = context.sum_over_ranks(torch.stack([token_sum(each, batch.mask) for each in terms]))
            sum_ratio, sum_squared, num_tokens = sums.tolist()
            # A micro-batch of padding alone adds nothing to the loss, whatever its ESS.
            ess = ess_from_sums(sum_ratio, sum_squared, num_tokens) if num_tokens != 0 else 1.0
        if self.kl_estimator == "official":
            kl = official_kl(log_ratios)
        elif self.kl_estimator == "importance":
            kl = importance_kl(log_ratios, cap=ess)
        else:
            kl = torch.zeros_like(log_ratios)
        return capped_and_anchored(logprobs, batch, context, ratios=ratios.detach(), kl=kl, ess=ess)


def capped_and_anchored(
    logprobs: Tensor, batch: TokenBatch, context: StepContext, *, ratios: Tensor, kl: Tensor, ess: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return P3O's loss and sums from e, detached `ratios` to the engine and the `kl`, both [batch, sequence]."""
    mask = batch.mask
    learner = response_values(logprobs, mask, "logprobs")
    advantages = response_values(batch.advantages, mask, "advantages")
    weights = ratios.clamp(max=ess)
    policy = -weights * advantages * learner
    kl_term = (1.0 - ess) * kl
    sums = {
        "cap_hits": token_sum(ratios > ess, mask),
        "weight": token_sum(weights, mask),
        "kl": token_sum(kl, mask),
        "policy_loss": token_sum(policy, mask),
        "kl_loss": token_sum(kl_term, mask),
        "objective_ess": token_sum(torch.full_like(weights, ess, dtype=torch.float64), mask),
    }
    return step_mean(policy + kl_term, mask, context), sums


def checked_ess(step_ess: float | None) -> float:
    """Return the ESS that `prepare` computed. Raises ValueError without it, FloatingPointError outside (0, 1]."""
    if step_ess is None:
        raise ValueError("this objective needs StepContext.step_ess, got None; score and prepare the whole step first")
    if not (math.isfinite(step_ess) and 0.0 < step_ess <= 1.0):
        raise FloatingPointError(f"step_ess is {step_ess}, expected a number in (0, 1]; take it from `prepare`")
    return step_ess


class P4O(Objective):
    """P4O, experimental: P3O anchored to a mixture of the engine and the learner's policy at the start of the stage.

        e_b, e_old = ESS of pi / pi_b and of pi / pi_old,   e = min(e_b, e_old)
        pi_mix      = (w_b pi_b + w_old pi_old) / (w_b + w_old),   w_b = 1 - e_b,   w_old = 1 - e_old
        loss        = 1/N sum_t { -sg(min(rho_t, e)) A_t log pi(y_t) + (1 - e) K_t },   rho_t = pi(y_t) / pi_b(y_t)

    K is the official estimator of KL(pi || pi_mix) (`precision.ratios`). From P3O's authors' code
    (github.com/FeynRL-project/FeynRL, algs/P4O), except that the two ESS are of the whole step, not of a micro-batch.

    Why experimental: the two-anchor extension collapsed after step 16 at temperature 1.2 in figure 8 of P3O's paper
    (arXiv 2605.12380), where P3O itself held, and no paper describes this form of it. On the first step of a stage
    pi_old is pi, so that w_old is 0 and P4O is P3O; the two differ only where a stage has several steps. Sums: as
    P3O's; `kl` is that to the mixture. Measured: `rollout_ess` and `old_ess` (e_b and e_old).
    """

    name: Literal["p4o"] = Field("p4o", description="P3O with a second anchor; experimental.")

    paper_aggregation: ClassVar[Aggregation | None] = "token"

    @property
    def facts(self) -> Facts:
        return replace(super().facts, needs_old_logprobs=True, has_term_without_advantage=True)

    def prepare(self, step: ScoredStep) -> Prepared:
        """Compute both ESS, and log pi_mix of every token as the anchor. Raises FloatingPointError when a log-ratio is
        not finite, ValueError without tokens."""
        anchors = (step.rollout_logprobs, step.old_logprobs)
        rollout_ess, old_ess = (token_ess(step.log_ratios(step.logprobs, x)[step.sampled]) for x in anchors)
        weights = (1.0 - rollout_ess, 1.0 - old_ess)
        total = sum(weights)
        if total <= 0.0:  # Neither anchor has moved: 1 - e is 0 as well, and whatever stands here counts for nothing.
            weights, total = (1.0, 0.0), 1.0
        terms = [
            torch.where(step.sampled, anchor.double(), 0.0) + (math.log(weight / total) if weight > 0.0 else -math.inf)
            for weight, anchor in zip(weights, anchors, strict=True)
        ]
        return Prepared(
            advantages=step.advantages,
            anchor_logprobs=torch.where(step.sampled, torch.logaddexp(*terms), 0.0).to(step.rollout_logprobs.dtype),
            step_ess=min(rollout_ess, old_ess),
            measured={"rollout_ess": rollout_ess, "old_ess": old_ess},
        )

    def loss(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        _, ratios = masked_log_ratios(logprobs.detach(), batch.rollout_logprobs, batch.mask)
        to_mixture, _ = masked_log_ratios(logprobs, prepared_anchor(batch), batch.mask)
        ess = checked_ess(context.step_ess)
        return capped_and_anchored(logprobs, batch, context, ratios=ratios, kl=official_kl(to_mixture), ess=ess)


class Split(Objective):
    """A capped importance weight against all of the mismatch, and a KL anchor against staleness alone.

        loss  = 1/N sum_t { -sg(min(rho_t, cap)) A_t log pi(y_t) + (1 - e) K_t }
        rho_t = pi(y_t) / pi_b(y_t) = w_q w_s,   w_q = pi_old(y_t) / pi_b(y_t),   w_s = pi(y_t) / pi_old(y_t)

    pi is the learner, pi_b the engine that sampled y_t, pi_old the learner at the version that sampled y_t, e the ESS
    of w_s under pi_old (`precision.ratios.staleness_ess`) and sg stop-gradient. w_q holds the disagreement of engine
    and learner, w_s what the learner has changed since. The weight corrects both; the anchor pulls back along w_s only.
    Toward the engine it would pull the learner to its own quantized copy, which follows the learner.

    K = w_q (w_s log w_s - w_s + 1) is unbiased for KL(pi || pi_old) under samples from pi_b. Its gradient here is
    sg(min(rho, cap)) log w_s grad log pi: the true slope is rho log w_s, and the cap keeps one token from dominating.

    A hypothesis of this project, tried in docs/evidence/robust.md; no paper describes it. While pi_old is pi, in sync
    with one update a batch, it is CISPO. Sums: `cap_hits` (tokens with rho > cap), `weight` (min(rho, cap)), `kl` (K
    before its weight), `policy_loss` and `kl_loss` (the two terms of the loss). Measured: `staleness_ess` (e).
    """

    name: Literal["split"] = "split"
    cap: float = Field(5.0, ge=1.0, description="Largest importance weight of a token, in both terms of the loss.")

    paper_aggregation: ClassVar[Aggregation | None] = "token"

    @property
    def facts(self) -> Facts:
        return replace(
            super().facts, needs_old_logprobs=True, needs_sampling_logprobs=True, has_term_without_advantage=True
        )

    def prepare(self, step: ScoredStep) -> Prepared:
        """Compute the ESS of the staleness over the whole step; make pi_old the anchor. Raises FloatingPointError when
        a log-ratio is not finite, ValueError without tokens."""
        mismatch = step.log_ratios(step.old_logprobs, step.rollout_logprobs)[step.sampled]
        ess = staleness_ess(mismatch, step.log_ratios(step.logprobs, step.old_logprobs)[step.sampled])
        return Prepared(
            advantages=step.advantages,
            anchor_logprobs=step.old_logprobs,
            step_ess=ess,
            measured={"staleness_ess": ess},
        )

    def loss(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        mask, ess = batch.mask, checked_ess(context.step_ess)
        _, ratios = masked_log_ratios(logprobs.detach(), batch.rollout_logprobs, mask)
        anchor = prepared_anchor(batch)
        staleness, _ = masked_log_ratios(logprobs, anchor, mask)
        _, mismatch = masked_log_ratios(anchor, batch.rollout_logprobs, mask)
        learner = response_values(logprobs, mask, "logprobs")
        advantages = response_values(batch.advantages, mask, "advantages")
        weights, stale = ratios.clamp(max=self.cap), staleness.detach()
        policy = -weights * advantages * learner
        kl = with_gradient(ratios * stale - ratios + mismatch, weights * stale, staleness)
        anchor_term = (1.0 - ess) * kl
        sums = {
            "cap_hits": token_sum(ratios > self.cap, mask),
            "weight": token_sum(weights, mask),
            "kl": token_sum(kl, mask),
            "policy_loss": token_sum(policy, mask),
            "kl_loss": token_sum(anchor_term, mask),
        }
        return step_mean(policy + anchor_term, mask, context), sums
