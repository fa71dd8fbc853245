"""Add a KL term that holds the policy near a reference to any objective.

    loss = objective + coefficient / N sum_t K_t,    l_t = log pi(y_t) - log pi_ref(y_t)

The estimators differ in the gradient (Tang & Munos, arXiv 2506.09477; Liu et al., arXiv 2510.01555). The gradient of
KL(pi || pi_ref), token by token, is E_pi[l grad log pi].

    estimator    value           factor of grad log pi     over samples of pi itself
    k2           l^2 / 2         l                         the gradient of KL(pi || pi_ref)
    k3           e^-l - 1 + l    1 - e^-l                  that of KL(pi_ref || pi): GRPO (arXiv 2402.03300, eq. 4)
    importance   rho k3          rho l, rho = pi / pi_b    the gradient of KL(pi || pi_ref), over samples of any pi_b
                                                           (DeepSeek-V3.2, arXiv 2512.02556, section 3.1)

k1 (l itself) has value KL and, differentiated, a gradient of mean 0: it is not offered. As a penalty in the reward it
has the gradient of k2. The KL is that of each token given the tokens before it. The effect of a token on the KL of
later tokens is left out, as in all these papers.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from pydantic import Field

from precision.objectives.objective import (
    Facts,
    Objective,
    Prepared,
    ScoredStep,
    StepContext,
    TokenBatch,
    step_mean,
    token_sum,
)
from precision.ratios import masked_differences, masked_log_ratios, official_kl, require, with_gradient
from precision.settings import Settings
from precision.torch_on_use import Tensor


class ReferenceSection(Settings):
    """The reference that the policy is held near, and the KL term to it."""

    coefficient: float = Field(gt=0.0, description="Weight of the KL term in the loss; GRPO's paper 0.04, often 0.001.")
    estimator: Literal["k2", "k3", "importance"] = Field(
        "k3",
        description="k3: GRPO's. k2: has the gradient of the KL where the policy itself sampled. importance: "
        "has it also where engine and learner differ, weighed by their ratio.",
    )
    cap: float = Field(5.0, gt=0.0, description="importance: the largest ratio, in the term and in its gradient.")
    path: Path | None = Field(None, description="HF folder of the reference, of the same model; default: model.path.")


class NearReference(Objective):
    """The objective `inner` with the KL term. Sums: `inner`'s, `kl_to_reference` (k3, whatever the estimator, so that
    curves compare) and `reference_loss` (the term, with its coefficient)."""

    name: Literal["near_reference"] = "near_reference"
    inner: Objective
    reference: ReferenceSection

    @property
    def facts(self) -> Facts:
        inner = self.inner.facts
        by_ratio = inner.weighs_by_rollout_ratio or self.reference.estimator == "importance"
        return dataclasses.replace(inner, weighs_by_rollout_ratio=by_ratio)

    def prepare(self, step: ScoredStep) -> Prepared:
        return self.inner.prepare(step)

    def loss(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Objective.loss`. Raises ValueError for a batch without the reference's log-probabilities, and
        FloatingPointError when a log-ratio to the reference is not finite; it may be of any size."""
        if batch.reference_logprobs is None:
            raise ValueError("reference_logprobs is None, expected [batch, sequence]; score the reference first")
        loss, sums = self.inner.loss(logprobs, dataclasses.replace(batch, reference_logprobs=None), context)
        log_ratios = masked_differences(logprobs, batch.reference_logprobs, batch.mask)
        finite = log_ratios.isfinite()
        require(
            finite,
            lambda: (
                f"{int((~finite).sum())} of {int(batch.mask.sum())} tokens have log-probabilities of the policy or "
                "of the reference that are not finite; look at the reference's weights"
            ),
        )
        _, ratios = masked_log_ratios(logprobs.detach(), batch.rollout_logprobs, batch.mask)
        term = self.reference.coefficient * reference_kl(log_ratios, ratios, self.reference)
        measured = {
            "kl_to_reference": token_sum(official_kl(log_ratios), batch.mask),
            "reference_loss": token_sum(term, batch.mask),
        }
        return loss + step_mean(term, batch.mask, context), sums | measured


def reference_kl(log_ratios: Tensor, ratios: Tensor, section: ReferenceSection) -> Tensor:
    """Return K and its gradient, nats, as `log_ratios` = log pi - log pi_ref; `ratios` = pi / pi_b, detached."""
    detached = log_ratios.detach()
    if section.estimator == "k2":
        return with_gradient(detached.square() / 2, detached, log_ratios)
    if section.estimator == "k3":
        return official_kl(log_ratios)
    weighed = ratios.clamp(max=section.cap)
    return with_gradient(weighed * official_kl(detached), weighed * detached, log_ratios)
