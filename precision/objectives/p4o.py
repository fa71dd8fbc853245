"""P4O, experimental: P3O anchored to a mixture of the engine and the learner's own policy at the start of the stage.

    e_b, e_prox = ESS of pi / pi_b and of pi / pi_prox,   e = min(e_b, e_prox)
    pi_mix      = (w_b pi_b + w_prox pi_prox) / (w_b + w_prox),   w_b = 1 - e_b,   w_prox = 1 - e_prox
    loss        = 1/N sum_t { -sg(min(rho_t, e)) A_t log pi(y_t) + (1 - e) K_t },   rho_t = pi(y_t) / pi_b(y_t)

with K the official estimator of KL(pi || pi_mix) (`precision.kl_estimators`); from P3O's authors' code
(github.com/FeynRL-project/FeynRL, algs/P4O), except that the two ESS are of the whole step, not of a micro-batch.

Why experimental: the two-anchor extension collapsed after step 16 at temperature 1.2 in figure 8 of P3O's paper
(arXiv 2605.12380), where P3O itself held, and no paper describes this form of it. On the first step of a stage pi_prox
is pi, so that w_prox is 0 and P4O is P3O; the two differ only where a stage has several steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from precision.ess import token_ess
from precision.kl_estimators import official_kl
from precision.objectives.base import Prepared, ScoredStep, StepContext, TokenBatch
from precision.objectives.clipped import prepared_anchor
from precision.objectives.p3o import capped_and_anchored, checked_ess
from precision.ratios import masked_log_ratios


@dataclass(frozen=True, kw_only=True)
class P4O:
    """Experimental (see above): never the first choice.

    Sums: as P3O's; `kl` is that to the mixture. Measured: `sampler_ess` and `old_ess` (e_b and e_prox).
    """

    @property
    def needs_scoring(self) -> bool:
        return True

    def prepare(self, step: ScoredStep) -> Prepared:
        """Both ESS, and log pi_mix of every token as the anchor.

        Raises FloatingPointError when a log-ratio is not finite, ValueError without tokens.
        """
        anchors = (step.rollout_logprobs, step.old_logprobs)
        sampler_ess, old_ess = (token_ess(step.log_ratios(step.logprobs, x)[step.sampled]) for x in anchors)
        return Prepared(
            advantages=step.advantages,
            anchor_logprobs=_mixture(step, weights=(1.0 - sampler_ess, 1.0 - old_ess)),
            step_ess=min(sampler_ess, old_ess),
            measured={"sampler_ess": sampler_ess, "old_ess": old_ess},
        )

    def __call__(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and sums of one micro-batch; see `Objective`.

        Raises FloatingPointError when a log-ratio or an advantage under the mask is not finite, or the ESS given is
        outside (0, 1]; ValueError when the step was not prepared.
        """
        _, ratios = masked_log_ratios(logprobs.detach(), batch.rollout_logprobs, batch.mask)
        to_mixture, _ = masked_log_ratios(logprobs, prepared_anchor(batch), batch.mask)
        ess = checked_ess(context.step_ess)
        return capped_and_anchored(logprobs, batch, context, ratios=ratios, kl=official_kl(to_mixture), ess=ess)


def _mixture(step: ScoredStep, *, weights: tuple[float, float]) -> Tensor:
    """[tokens], in the dtype of the log-probabilities: log of the weighted mean of the sampler's and the old
    probability; 0 where not sampled."""
    total = sum(weights)
    if total <= 0.0:  # Neither anchor has moved: 1 - e is 0 as well, and whatever stands here counts for nothing.
        weights, total = (1.0, 0.0), 1.0
    terms = [
        torch.where(step.sampled, anchor.double(), 0.0) + (math.log(weight / total) if weight > 0.0 else -math.inf)
        for weight, anchor in zip(weights, (step.rollout_logprobs, step.old_logprobs), strict=True)
    ]
    return torch.where(step.sampled, torch.logaddexp(*terms), 0.0).to(step.rollout_logprobs.dtype)
