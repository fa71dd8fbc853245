"""P3O: policy optimization capped and anchored by the effective sample size (arXiv 2605.12380, Eq. 11 and 12).

    loss = 1/N sum_t { -sg(min(rho_t, e)) A_t log pi(y_t) + (1 - e) K_t },   rho_t = exp(l_t),  l_t = log pi - log pi_b

with pi the learner, pi_b the engine that sampled y_t, e the ESS of the batch (`precision.ess`) and sg stop-gradient.
Two estimators K of the anchor KL(pi || pi_b), both over sampled tokens:

`official`: K = l + exp(clip(-l, -10, 10)) - 1, as in the authors' code. It is the estimator for samples from pi; ours
    come from pi_b, where its mean is chi^2(pi_b || pi) - KL(pi_b || pi): mass-covering and heavy-tailed. Its gradient
    here is 1 - exp(clip(-l, -10, 10)). Differentiating the clipped form instead gives +1 below l = -10, where the true
    slope is hugely negative, and pushes a vanishing token further down.
`importance`: K = rho l - rho + 1, unbiased for samples from pi_b, with gradient sg(min(rho, e)) l grad log pi: the true
    slope is rho l; the cap keeps one token from dominating. (The cap is ours, not the paper's.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from precision.ess import ess_from_sums
from precision.objectives.base import StepContext, TokenBatch
from precision.objectives.tokens import response_values, step_mean, token_sum, with_gradient
from precision.ratios import masked_log_ratios

KL_EXPONENT_LIMIT = 10.0
"""Bound on |l| inside the exponential of the official estimator."""


@dataclass(frozen=True, kw_only=True)
class P3O:
    """`ess_scope`: "step" takes the ESS of the whole step from a no-grad pass (`StepContext.step_ess`); "micro_batch",
    as in the authors' code, takes that of each micro-batch over all ranks, so it depends on the micro-batch size and
    every rank must hold the same number of micro-batches.

    Sums: `cap_hits` (tokens with rho > e), `weight` (min(rho, e)), `kl` (K before its weight), `policy_loss` and
    `kl_loss` (the two terms of the loss), `objective_ess` (e, counted once a token: its mean over the step is the
    token-weighted mean of the micro-batches' ESS).
    """

    ess_scope: Literal["step", "micro_batch"] = "step"
    kl_estimator: Literal["official", "importance"] = "official"

    @property
    def needs_step_ess(self) -> bool:
        return self.ess_scope == "step"

    def __call__(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and sums of one micro-batch; see `Objective`.

        Raises FloatingPointError when a log-ratio or an advantage under the mask is not finite, or the ESS given is
        outside (0, 1]; ValueError when step scope gets no ESS.
        """
        mask = batch.mask
        log_ratios, ratios = masked_log_ratios(logprobs, batch.sampler_logprobs, mask)
        learner = response_values(logprobs, mask, "logprobs")
        advantages = response_values(batch.advantages, mask, "advantages")
        ess = self._ess(ratios.detach(), mask, context)

        weights = ratios.detach().clamp(max=ess)
        policy = -weights * advantages * learner
        kl = self._kl(log_ratios, ess)
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

    def _ess(self, ratios: Tensor, mask: Tensor, context: StepContext) -> float:
        if self.ess_scope == "step":
            return _checked(context.step_ess)
        sums = torch.stack([token_sum(x, mask) for x in (ratios, ratios.double().square(), mask)])
        sum_ratio, sum_squared, num_tokens = context.sum_over_ranks(sums).tolist()
        # A micro-batch of padding alone adds nothing to the loss, whatever its ESS.
        return ess_from_sums(sum_ratio, sum_squared, num_tokens) if num_tokens != 0 else 1.0

    def _kl(self, log_ratios: Tensor, ess: float) -> Tensor:
        detached = log_ratios.detach()
        # expm1 instead of exp - 1: at l = 1e-3 the value is 5e-7, below float32's resolution around 1.
        if self.kl_estimator == "official":
            rise = torch.expm1((-detached).clamp(-KL_EXPONENT_LIMIT, KL_EXPONENT_LIMIT))
            return with_gradient(detached + rise, -rise, log_ratios)
        ratios = detached.exp()
        return with_gradient(ratios * detached - torch.expm1(detached), ratios.clamp(max=ess) * detached, log_ratios)


def _checked(step_ess: float | None) -> float:
    if step_ess is None:
        raise ValueError("ess_scope step needs StepContext.step_ess, got None; score the whole step first")
    if not (math.isfinite(step_ess) and 0.0 < step_ess <= 1.0):
        raise FloatingPointError(f"step_ess is {step_ess}, expected a number in (0, 1]; take it from RatioSums.ess")
    return step_ess
