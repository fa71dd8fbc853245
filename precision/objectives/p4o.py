"""P4O, experimental: P3O anchored to a mixture of the engine and the learner's own policy at the start of the stage.

    e_b, e_old = ESS of pi / pi_b and of pi / pi_old,   e = min(e_b, e_old)
    pi_mix      = (w_b pi_b + w_old pi_old) / (w_b + w_old),   w_b = 1 - e_b,   w_old = 1 - e_old
    loss        = 1/N sum_t { -sg(min(rho_t, e)) A_t log pi(y_t) + (1 - e) K_t },   rho_t = pi(y_t) / pi_b(y_t)

with K the official estimator of KL(pi || pi_mix) (`precision.kl_estimators`); from P3O's authors' code
(github.com/FeynRL-project/FeynRL, algs/P4O), except that the two ESS are of the whole step, not of a micro-batch.

Why experimental: the two-anchor extension collapsed after step 16 at temperature 1.2 in figure 8 of P3O's paper
(arXiv 2605.12380), where P3O itself held, and no paper describes this form of it. On the first step of a stage pi_old
is pi, so that w_old is 0 and P4O is P3O; the two differ only where a stage has several steps.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field

from precision.ess import token_ess
from precision.kl_estimators import official_kl
from precision.measures import CAPPED_TOKENS, MEAN_WEIGHT, Measure
from precision.objectives.base import Aggregation, Objective, Prepared, ScoredStep, StepContext, TokenBatch
from precision.objectives.clipped import prepared_anchor
from precision.objectives.p3o import ESS_IN_USE, PARTS_OF_THE_LOSS, capped_and_anchored, checked_ess
from precision.ratios import masked_log_ratios
from precision.torch_on_use import Tensor, torch


class P4O(Objective):
    """Experimental (see above): never the first choice.

    Sums: as P3O's; `kl` is that to the mixture. Measured: `rollout_ess` and `old_ess` (e_b and e_old).
    """

    name: Literal["p4o"] = Field("p4o", description="P3O with a second anchor; experimental.")

    paper_aggregation: ClassVar[Aggregation | None] = "token"
    measures: ClassVar[tuple[Measure, ...]] = (
        CAPPED_TOKENS,
        MEAN_WEIGHT,
        PARTS_OF_THE_LOSS,
        Measure(
            ESS_IN_USE.title,
            (
                *ESS_IN_USE.lines,
                ("rollout_ess", "of the engine", "blue"),
                ("old_ess", "of the stage's start", "teal"),
            ),
        ),
    )

    @property
    def has_term_without_advantage(self) -> bool:
        return True

    @property
    def needs_old_logprobs(self) -> bool:
        return True

    def prepare(self, step: ScoredStep) -> Prepared:
        """Both ESS, and log pi_mix of every token as the anchor.

        Raises FloatingPointError when a log-ratio is not finite, ValueError without tokens.
        """
        anchors = (step.rollout_logprobs, step.old_logprobs)
        rollout_ess, old_ess = (token_ess(step.log_ratios(step.logprobs, x)[step.sampled]) for x in anchors)
        return Prepared(
            advantages=step.advantages,
            anchor_logprobs=_mixture(step, weights=(1.0 - rollout_ess, 1.0 - old_ess)),
            step_ess=min(rollout_ess, old_ess),
            measured={"rollout_ess": rollout_ess, "old_ess": old_ess},
        )

    def loss(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Objective.loss`."""
        _, ratios = masked_log_ratios(logprobs.detach(), batch.rollout_logprobs, batch.mask)
        to_mixture, _ = masked_log_ratios(logprobs, prepared_anchor(batch), batch.mask)
        ess = checked_ess(context.step_ess)
        return capped_and_anchored(logprobs, batch, context, ratios=ratios, kl=official_kl(to_mixture), ess=ess)


def _mixture(step: ScoredStep, *, weights: tuple[float, float]) -> Tensor:
    """[tokens], in the dtype of the log-probabilities: log of the weighted mean of the engine's and the old
    probability; 0 where not sampled."""
    total = sum(weights)
    if total <= 0.0:  # Neither anchor has moved: 1 - e is 0 as well, and whatever stands here counts for nothing.
        weights, total = (1.0, 0.0), 1.0
    terms = [
        torch.where(step.sampled, anchor.double(), 0.0) + (math.log(weight / total) if weight > 0.0 else -math.inf)
        for weight, anchor in zip(weights, (step.rollout_logprobs, step.old_logprobs), strict=True)
    ]
    return torch.where(step.sampled, torch.logaddexp(*terms), 0.0).to(step.rollout_logprobs.dtype)
