"""Split: a capped importance weight against all of the mismatch, and a KL anchor against staleness alone.

    loss  = 1/N sum_t { -sg(min(rho_t, cap)) A_t log pi(y_t) + (1 - e) K_t }
    rho_t = pi(y_t) / pi_b(y_t) = w_q w_s,   w_q = pi_old(y_t) / pi_b(y_t),   w_s = pi(y_t) / pi_old(y_t)

with pi the learner, pi_b the engine that sampled y_t, pi_old the learner at the version that sampled y_t, e the ESS of
w_s under pi_old (`precision.ess.staleness_ess`) and sg stop-gradient. w_q is what engine and learner disagree about,
w_s what the learner has changed since. The weight corrects both; the anchor pulls back along w_s only. Toward the
engine it would pull the learner to its own quantized copy, which follows the learner: the pull would feed on itself.

K = w_q (w_s log w_s - w_s + 1) is unbiased for KL(pi || pi_old) under samples from pi_b. Its gradient here is
sg(min(rho, cap)) log w_s grad log pi: the true slope is rho log w_s, and the cap keeps one token from dominating.

A hypothesis of this project's, tried in docs/evidence/robust.md; no paper describes it. While pi_old is pi, in sync
with one update a batch, it is CISPO.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from precision.ess import staleness_ess
from precision.kl_estimators import with_gradient
from precision.measures import CAPPED_TOKENS, MEAN_WEIGHT, Measure
from precision.objectives.base import Aggregation, Objective, Prepared, ScoredStep, StepContext, TokenBatch
from precision.objectives.clipped import prepared_anchor
from precision.objectives.p3o import PARTS_OF_THE_LOSS, checked_ess
from precision.objectives.tokens import response_values, step_mean, token_sum
from precision.ratios import masked_log_ratios
from precision.torch_on_use import Tensor


class Split(Objective):
    """Sums: `cap_hits` (tokens with rho > cap), `weight` (min(rho, cap)), `kl` (K before its weight), `policy_loss` and
    `kl_loss` (the two terms of the loss). Measured: `staleness_ess` (e)."""

    name: Literal["split"] = "split"
    cap: float = Field(5.0, ge=1.0, description="Largest importance weight of a token, in both terms of the loss.")

    paper_aggregation: ClassVar[Aggregation | None] = "token"
    measures: ClassVar[tuple[Measure, ...]] = (
        CAPPED_TOKENS,
        MEAN_WEIGHT,
        PARTS_OF_THE_LOSS,
        Measure("ESS of the staleness", (("staleness_ess", "under pi_old", "violet"),)),
    )

    @property
    def has_term_without_advantage(self) -> bool:
        return True

    @property
    def needs_old_logprobs(self) -> bool:
        return True

    @property
    def needs_sampling_logprobs(self) -> bool:
        return True

    def prepare(self, step: ScoredStep) -> Prepared:
        """The ESS of the staleness over the whole step, and pi_old as the anchor. Raises FloatingPointError when a
        log-ratio is not finite, ValueError without tokens."""
        mismatch = step.log_ratios(step.old_logprobs, step.rollout_logprobs)[step.sampled]
        ess = staleness_ess(mismatch, step.log_ratios(step.logprobs, step.old_logprobs)[step.sampled])
        return Prepared(
            advantages=step.advantages,
            anchor_logprobs=step.old_logprobs,
            step_ess=ess,
            measured={"staleness_ess": ess},
        )

    def loss(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Objective.loss`."""
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
        kl_term = (1.0 - ess) * kl
        sums = {
            "cap_hits": token_sum(ratios > self.cap, mask),
            "weight": token_sum(weights, mask),
            "kl": token_sum(kl, mask),
            "policy_loss": token_sum(policy, mask),
            "kl_loss": token_sum(kl_term, mask),
        }
        return step_mean(policy + kl_term, mask, context), sums
