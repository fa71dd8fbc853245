"""What every correction takes, returns and states about itself, and an objective whose advantages one has weighed.

Every policy term is linear in the advantage while its sign stays, so a non-negative factor on A is a factor on the
term: the one wrapper here serves all pairs of objective and correction.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from precision.measures import Measure
from precision.objectives.base import Objective, Prepared, ScoredStep, StepContext, TokenBatch
from precision.objectives.tokens import scaled_advantages
from precision.settings import Settings
from precision.torch_on_use import Tensor

MEAN_FACTOR = Measure("Mean factor of the correction", (("correction_factor", "factor", "teal"),))

MASKED_TOKENS = Measure(
    "Tokens dropped by the correction",
    (
        ("correction_masked_positive", "A > 0", "blue"),
        ("correction_masked_negative", "A < 0", "orange"),
    ),
    percent=True,
    floor=0.0,
)


class Correction(Settings, ABC):
    """Settings and mathematics of one correction: a pure function of the scored step."""

    name: str

    weighs_by_old_ratio: ClassVar[bool] = True
    """Whether k = pi_old / pi_engine decides the factor. An objective that divides by pi_engine counts k already."""
    reads_rollout_logprobs: ClassVar[bool] = True
    """Whether the engine's stored log-probabilities decide the factor."""
    reads_step_logprobs: ClassVar[bool] = True
    """Whether `factor` reads `ScoredStep.logprobs`; see `Objective.reads_step_logprobs`."""
    drops_what_the_learner_left: ClassVar[bool] = False
    """Whether it drops failed responses that the learner has moved away from. An objective may have its own rule."""
    measures: ClassVar[tuple[Measure, ...]] = (MASKED_TOKENS, MEAN_FACTOR)
    """How a report draws what `factor` measured."""

    @abstractmethod
    def factor(self, step: ScoredStep) -> tuple[Tensor, dict[str, float]]:
        """The factor, float64 [tokens], finite and at least 0 (anything of the kind where not sampled), and what is to
        be known of it, by the name that metrics use.

        Raises FloatingPointError when a log-ratio is not finite.
        """

    def applied_to(self, objective: Objective) -> Objective:
        """The objective that the learner trains with."""
        return Corrected(inner=objective, correction=self)


class Corrected(Objective):
    """`inner` after `correction`. Sums: those of `inner`. Measured: the correction's and those of `inner`."""

    name: Literal["corrected"] = "corrected"
    inner: Objective
    correction: Correction

    @property
    def needs_old_logprobs(self) -> bool:
        return self.inner.needs_old_logprobs or self.correction.weighs_by_old_ratio

    @property
    def needs_sampling_logprobs(self) -> bool:
        return self.inner.needs_sampling_logprobs

    @property
    def reads_step_logprobs(self) -> bool:
        return self.correction.reads_step_logprobs or (self.inner.needs_scoring and self.inner.reads_step_logprobs)

    @property
    def weighs_by_rollout_ratio(self) -> bool:
        return self.inner.weighs_by_rollout_ratio or self.correction.reads_rollout_logprobs

    def prepare(self, step: ScoredStep) -> Prepared:
        """The factor on the advantages, then `inner`'s own preparation. Raises as both."""
        factor, measured = self.correction.factor(step)
        advantages = scaled_advantages(step, factor)
        prepared = Prepared(advantages=advantages)
        if self.inner.needs_scoring:
            prepared = self.inner.prepare(dataclasses.replace(step, advantages=advantages))
        return dataclasses.replace(prepared, measured={**measured, **prepared.measured})

    def loss(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Objective.loss`."""
        return self.inner.loss(logprobs, batch, context)
