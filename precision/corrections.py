"""Corrections for an engine that samples from another distribution than the learner's.

A correction reads a whole scored step and returns a factor on the advantage of every token, from

    k_t = pi_old(y_t) / pi_engine(y_t),

with pi_old the learner's policy before the first of several updates. Every policy term is linear in the advantage while
its sign stays. So a non-negative factor on A is a factor on the term, and one wrapper, `Corrected`, serves all pairs of
objective and correction. A correction belongs to an objective whose ratio is pi / pi_old: an objective that divides by
the engine's probability has k in its ratio already, and would count it twice. OPSM is the exception, since it only
drops. No factor touches the denominator of the loss: a dropped token still counts.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from precision.objectives.objective import (
    Facts,
    Objective,
    Prepared,
    ScoredStep,
    StepContext,
    TokenBatch,
    sampled_mean,
    scaled_advantages,
)
from precision.settings import Settings
from precision.torch_on_use import Tensor, torch


class Correction(Settings, ABC):
    """Settings and mathematics of a correction: a pure function of the scored step."""

    name: str

    weighs_by_old_ratio: ClassVar[bool] = True
    """Whether k = pi_old / pi_engine decides the factor. An objective that divides by pi_engine counts k already."""
    reads_rollout_logprobs: ClassVar[bool] = True
    """Whether the engine's stored log-probabilities decide the factor."""
    reads_step_logprobs: ClassVar[bool] = True
    """Whether `factor` reads `ScoredStep.logprobs`; see `Facts.reads_step_logprobs`."""
    drops_what_the_learner_left: ClassVar[bool] = False
    """Whether it drops failed responses that the learner has moved away from. An objective may have its own rule."""

    @abstractmethod
    def factor(self, step: ScoredStep) -> tuple[Tensor, dict[str, float]]:
        """Return the factor, float64 [tokens], finite and at least 0 (any such value where not sampled), and
        measurements by metric name. Raises FloatingPointError when a log-ratio is not finite."""


class Corrected(Objective):
    """The objective `inner` after `correction`. Sums: `inner`'s. Measured: the correction's and `inner`'s."""

    name: Literal["corrected"] = "corrected"
    inner: Objective
    correction: Correction

    @property
    def facts(self) -> Facts:
        inner, own = self.inner.facts, self.correction
        return Facts(
            needs_scoring=True,
            needs_old_logprobs=inner.needs_old_logprobs or own.weighs_by_old_ratio,
            needs_sampling_logprobs=inner.needs_sampling_logprobs,
            reads_step_logprobs=own.reads_step_logprobs or (inner.needs_scoring and inner.reads_step_logprobs),
            weighs_by_rollout_ratio=inner.weighs_by_rollout_ratio or own.reads_rollout_logprobs,
        )

    def prepare(self, step: ScoredStep) -> Prepared:
        """Multiply the advantages by the factor, then prepare `inner`. Raises as both."""
        factor, measured = self.correction.factor(step)
        advantages = scaled_advantages(step, factor)
        prepared = Prepared(advantages=advantages)
        if self.inner.facts.needs_scoring:
            prepared = self.inner.prepare(dataclasses.replace(step, advantages=advantages))
        return dataclasses.replace(prepared, measured={**measured, **prepared.measured})

    def loss(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        return self.inner.loss(logprobs, batch, context)


Level = Annotated[
    Literal["token", "sequence", "geometric"],
    Field(
        description="Whose ratio is held to the range: the token's own; the product over its response; or the "
        "geometric mean over its response, which does not depend on length and wants bounds close to 1."
    ),
]

Veto = Annotated[
    float,
    Field(
        ge=0.0,
        lt=1.0,
        description="A response with the ratio of any token below this is dropped whole; 1e-4 in slime, 0 is off.",
    ),
]

LOG_RATIO_LIMIT = 20.0
"""Nats. log k is clamped to this before exp, as in verl and slime: no product over a long response overflows."""


class RatioRange(Correction):
    """Base of the corrections that keep ratios pi_old / pi_engine within a range."""

    low: float = Field(
        0.5,
        ge=0.0,
        description="Smallest ratio; .5 and 2 are usual. Level geometric needs a narrow range: .999 to 1.001 in verl, "
        ".9999 to 1.0001 in slime.",
    )
    high: PositiveFloat = Field(2.0, description="Largest ratio.")

    reads_step_logprobs: ClassVar[bool] = False

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}; .5 and 2 are usual for tokens")
        return self


def mismatch_ratios(step: ScoredStep, level: Level) -> Tensor:
    """Return k: float64 [tokens], above 0, 1 where not sampled. Raises FloatingPointError on non-finite logprobs."""
    log_ratios = step.log_ratios(step.old_logprobs, step.rollout_logprobs)
    if level != "token":
        of_rows = step.row_sum(log_ratios) if level == "sequence" else step.row_mean(log_ratios)
        log_ratios = torch.where(step.sampled, of_rows[step.row], 0.0)
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def kept_tokens(step: ScoredStep, ratios: Tensor, low: float, high: float, veto: float) -> Tensor:
    """Return bool [tokens]: True where the ratio is in [low, high] and the response is not vetoed. A response is vetoed
    when the unclamped k of one of its tokens is below `veto`."""
    own = step.log_ratios(step.old_logprobs, step.rollout_logprobs).exp()
    return (low <= ratios) & (ratios <= high) & ~(step.row_sum(own < veto) > 0)[step.row]


def measured(step: ScoredStep, factor: Tensor, name: str, hit: Tensor) -> dict[str, float]:
    """Return `correction_factor` (its mean over sampled tokens), and `correction_NAME_positive` and `_negative`: tokens
    in `hit` (bool [tokens]) with A > 0 and with A < 0, as shares of all sampled tokens."""
    return {
        "correction_factor": sampled_mean(step, factor),
        f"correction_{name}_positive": sampled_mean(step, hit & (step.advantages > 0)),
        f"correction_{name}_negative": sampled_mean(step, hit & (step.advantages < 0)),
    }


class NoCorrection(Correction):
    """No correction: the learner trains with the objective alone, without a pass over the step."""

    name: Literal["none"] = "none"

    weighs_by_old_ratio: ClassVar[bool] = False
    reads_rollout_logprobs: ClassVar[bool] = False
    reads_step_logprobs: ClassVar[bool] = False

    def factor(self, step: ScoredStep) -> tuple[Tensor, dict[str, float]]:
        return torch.ones_like(step.advantages, dtype=torch.float64), {}


class TIS(Correction):
    """Truncated importance sampling between the engine and the learner (fengyao.notion.site/off-policy-rl; the
    truncation is that of Ionides, 2008).

        factor = min(k, cap)

    Biased toward the engine's distribution where k is above the cap; the cap bounds the variance. log k is clamped to
    +-20, which matters for caps above e^20 only. Measured: `correction_factor` (mean), `correction_capped_positive` and
    `_negative` (share of all tokens above the cap, by sign of A).
    """

    name: Literal["tis"] = "tis"
    cap: PositiveFloat = Field(2.0, description="Largest pi_old / pi_engine; 2 in verl and slime.")
    level: Literal["token", "sequence"] = Field("token", description="One ratio a token, or its response's product.")

    reads_step_logprobs: ClassVar[bool] = False

    def factor(self, step: ScoredStep) -> tuple[Tensor, dict[str, float]]:
        ratios = mismatch_ratios(step, self.level)
        factor = ratios.clamp(max=self.cap)
        return factor, measured(step, factor, "capped", ratios > self.cap)


class Rejection(RatioRange):
    """Rejection of tokens whose ratio is out of range, without weights (`rs` in verl's and slime's options).

        factor = 1 if low <= k <= high and the response is not vetoed, else 0

    log k is clamped to +-20 for the bounds, not for the veto. Measured: `correction_factor` (mean),
    `correction_masked_positive` and `_negative` (share of all tokens that are dropped, by sign of A).
    """

    name: Literal["rejection"] = "rejection"
    level: Level = "token"
    veto: Veto = 0.0

    def factor(self, step: ScoredStep) -> tuple[Tensor, dict[str, float]]:
        kept = kept_tokens(step, mismatch_ratios(step, self.level), self.low, self.high, self.veto)
        factor = kept.double()
        return factor, measured(step, factor, "masked", ~kept)


class MIS(RatioRange):
    """Masked importance sampling: rejection that weighs kept tokens by k. The `mis` example of slime is published
    with `veto` 1e-4; in verl it is `rollout_is` with `rollout_rs`.

        factor = k if low <= k <= high and the response is not vetoed, else 0

    `normalized` is not slime's: the mean here is over kept tokens, slime's over all tokens, also those that its mask
    then rejects. slime's mask also shrinks the loss's denominator; no factor here does. Measured: as `Rejection`.
    """

    name: Literal["mis"] = "mis"
    level: Level = "token"
    veto: Veto = 0.0
    normalized: bool = Field(
        False,
        description="Divide by the mean weight of what is kept, over tokens at level token and over responses "
        "otherwise, so that the correction changes no step size.",
    )

    def factor(self, step: ScoredStep) -> tuple[Tensor, dict[str, float]]:
        ratios = mismatch_ratios(step, self.level)
        kept = kept_tokens(step, ratios, self.low, self.high, self.veto)
        factor = torch.where(kept, ratios, 0.0)
        if self.normalized:
            of_units = factor[step.sampled] if self.level == "token" else step.row_mean(factor)
            weights = of_units[of_units > 0]
            factor = factor / (float(weights.mean()) if weights.numel() else 1.0)
        return factor, measured(step, factor, "masked", ~kept)


class IcePop(RatioRange):
    """Weights k where engine and learner roughly agree, and 0 elsewhere, token by token (Ring-1T, arXiv 2510.18855).

        factor = k if low <= k <= high, else 0

    Dropped tokens stay in the denominator, as in the paper. Measured: `correction_factor` (mean),
    `correction_masked_positive` and `_negative` (share of all tokens that are dropped, by sign of A).
    """

    name: Literal["icepop"] = "icepop"
    high: PositiveFloat = Field(5.0, description="Largest ratio; .5 and 5 are the paper's alpha and beta.")

    def factor(self, step: ScoredStep) -> tuple[Tensor, dict[str, float]]:
        ratios = mismatch_ratios(step, "token")
        kept = (self.low <= ratios) & (ratios <= self.high)
        factor = torch.where(kept, ratios, 0.0)
        return factor, measured(step, factor, "masked", ~kept)


class OPSM(Correction):
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556).

        factor = 0 if A < 0 and mean_t log(pi_b(y_t) / pi(y_t)) > delta, else 1

    Failed responses that the learner has moved away from are dropped: pushing them down further teaches little, and its
    gradient is unbounded. pi_b is the engine that sampled, so its mismatch is part of the distance. Advantages decide
    token by token, as in the paper; usually a response has just one. Measured: `correction_factor` (mean),
    `correction_masked_positive` (always 0) and `_negative` (share of all tokens that are dropped).
    """

    name: Literal["opsm"] = "opsm"
    delta: NonNegativeFloat = Field(
        1e-4, description="Largest mean log-ratio of a failed response, nats a token; 1e-4 in slime (--opsm-delta)."
    )

    weighs_by_old_ratio: ClassVar[bool] = False
    drops_what_the_learner_left: ClassVar[bool] = True

    def factor(self, step: ScoredStep) -> tuple[Tensor, dict[str, float]]:
        distance = step.row_mean(step.log_ratios(step.rollout_logprobs, step.logprobs))
        masked = (step.advantages < 0) & (distance > self.delta)[step.row]
        factor = (~masked).double()
        return factor, measured(step, factor, "masked", masked)
