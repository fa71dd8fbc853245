"""An objective whose advantages a correction has weighed first.

Every policy term is linear in the advantage while its sign stays, so a non-negative factor on A is a factor on the
term: this one wrapper serves all pairs of objective and correction (`precision.corrections`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from precision.objectives.base import Objective, Prepared, ScoredStep, StepContext, TokenBatch
from precision.objectives.tokens import scaled_advantages


class Correction(Protocol):
    """A pure function of the scored step. Raises FloatingPointError when a log-ratio is not finite."""

    def __call__(self, step: ScoredStep) -> tuple[Tensor, dict[str, float]]:
        """The factor, float64 [tokens], finite and at least 0 (anything of the kind where not sampled), and what is to
        be known of it, by the name that metrics use."""
        ...


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """`inner` after `correction`. Corrections by pi_prox / pi_engine need an `inner` anchored to pi_prox.

    Sums: those of `inner`. Measured: the correction's and those of `inner`.
    """

    inner: Objective
    correction: Correction

    @property
    def needs_scoring(self) -> bool:
        return True

    def prepare(self, step: ScoredStep) -> Prepared:
        """The factor on the advantages, then `inner`'s own preparation. Raises as both."""
        factor, measured = self.correction(step)
        advantages = scaled_advantages(step, factor)
        prepared = Prepared(advantages=advantages)
        if self.inner.needs_scoring:
            prepared = self.inner.prepare(dataclasses.replace(step, advantages=advantages))
        return dataclasses.replace(prepared, measured={**measured, **prepared.measured})

    def __call__(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and sums of one micro-batch; see `Objective`."""
        return self.inner(logprobs, batch, context)
