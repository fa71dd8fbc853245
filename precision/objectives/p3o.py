"""P3O: policy optimization capped and anchored by the effective sample size (arXiv 2605.12380, Eq. 11 and 12).

    loss = 1/N sum_t { -sg(min(rho_t, e)) A_t log pi(y_t) + (1 - e) K_t },   rho_t = pi(y_t) / pi_b(y_t)

with pi the learner, pi_b the engine that sampled y_t, e the ESS of the batch (`precision.ess`), K an estimator of the
anchor KL(pi || pi_b) (`precision.kl_estimators`) and sg stop-gradient. There is no clip to tune: where the two policies
agree e is 1 and this is the plain policy gradient; where they part every weight shrinks and the anchor takes over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from precision.ess import ess_from_sums, sequence_ess_of_totals, token_ess
from precision.kl_estimators import importance_kl, official_kl
from precision.objectives.base import Prepared, ScoredStep, StepContext, TokenBatch
from precision.objectives.tokens import response_values, step_mean, token_sum
from precision.ratios import masked_log_ratios


@dataclass(frozen=True, kw_only=True)
class P3O:
    """`ess_scope`: "step" takes the ESS of the whole step from a no-grad pass (`prepare`); "micro_batch", as in the
    authors' code, takes that of each micro-batch over all ranks, so it depends on the micro-batch size and every rank
    must hold the same number of micro-batches.

    `ess_unit`: "token" is the paper's; "sequence" takes the ESS of whole responses, whose ratios are products over
    their tokens. It falls far faster with length, and needs step scope: a micro-batch may hold parts of responses.

    `kl_estimator`: "official" is the authors' code; "importance" is the one that fits samples from the engine, its
    gradient weight capped at e.

    Sums: `cap_hits` (tokens with rho > e), `weight` (min(rho, e)), `kl` (K before its weight), `policy_loss` and
    `kl_loss` (the two terms of the loss), `objective_ess` (e, counted once a token: its mean over the step is the
    token-weighted mean of the micro-batches' ESS). Raises ValueError for sequence ESS in micro-batch scope.
    """

    ess_scope: Literal["step", "micro_batch"] = "step"
    ess_unit: Literal["token", "sequence"] = "token"
    kl_estimator: Literal["official", "importance"] = "official"

    def __post_init__(self) -> None:
        if self.ess_unit == "sequence" and self.ess_scope != "step":
            raise ValueError(
                f"ess_unit sequence with ess_scope {self.ess_scope}: expected ess_scope step, as a micro-batch may "
                "hold parts of responses"
            )

    @property
    def needs_scoring(self) -> bool:
        return self.ess_scope == "step"

    def prepare(self, step: ScoredStep) -> Prepared:
        """The ESS of the step. Raises FloatingPointError when a log-ratio is not finite, ValueError without tokens."""
        log_ratios = step.log_ratios(step.logprobs, step.rollout_logprobs)
        if self.ess_unit == "token":
            ess = token_ess(log_ratios[step.sampled])
        else:
            answered = step.row_sum(step.sampled) > 0
            ess = sequence_ess_of_totals(step.row_sum(log_ratios)[answered])
        return Prepared(advantages=step.advantages, step_ess=ess)

    def __call__(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and sums of one micro-batch; see `Objective`.

        Raises FloatingPointError when a log-ratio or an advantage under the mask is not finite, or the ESS given is
        outside (0, 1]; ValueError when step scope gets no ESS.
        """
        log_ratios, ratios = masked_log_ratios(logprobs, batch.rollout_logprobs, batch.mask)
        ess = self._ess(ratios.detach(), batch.mask, context)
        kl = official_kl(log_ratios) if self.kl_estimator == "official" else importance_kl(log_ratios, cap=ess)
        return capped_and_anchored(logprobs, batch, context, ratios=ratios.detach(), kl=kl, ess=ess)

    def _ess(self, ratios: Tensor, mask: Tensor, context: StepContext) -> float:
        if self.ess_scope == "step":
            return checked_ess(context.step_ess)
        sums = torch.stack([token_sum(x, mask) for x in (ratios, ratios.double().square(), mask)])
        sum_ratio, sum_squared, num_tokens = context.sum_over_ranks(sums).tolist()
        # A micro-batch of padding alone adds nothing to the loss, whatever its ESS.
        return ess_from_sums(sum_ratio, sum_squared, num_tokens) if num_tokens != 0 else 1.0


def capped_and_anchored(
    logprobs: Tensor, batch: TokenBatch, context: StepContext, *, ratios: Tensor, kl: Tensor, ess: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss above, and its sums, from the detached `ratios` to the sampler, the anchor's `kl` (with its gradient),
    both [batch, sequence], and e."""
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
    """The ESS that `prepare` found. Raises ValueError without one, FloatingPointError outside (0, 1]."""
    if step_ess is None:
        raise ValueError("this objective needs StepContext.step_ess, got None; score and prepare the whole step first")
    if not (math.isfinite(step_ess) and 0.0 < step_ess <= 1.0):
        raise FloatingPointError(f"step_ess is {step_ess}, expected a number in (0, 1]; take it from `prepare`")
    return step_ess
