"""From a batch to what each of its tokens is trained with: estimator, normalization, aggregation, in this order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.advantages import AdvantageEstimator
from pipeline.advantages.aggregation import informative_samples, token_advantages
from pipeline.config.algorithm import AdvantageSection
from pipeline.data.records import Batch


@dataclass(frozen=True, kw_only=True)
class ComputedAdvantages:
    """What the learner takes."""

    advantages: NDArray[np.float32]
    """[responses]"""
    trained: NDArray[np.bool_] | None
    """[samples] those that are run through the model; None for all."""


@dataclass(frozen=True, kw_only=True)
class AdvantageComputer:
    """The advantage section of a recipe at work."""

    section: AdvantageSection
    estimator: AdvantageEstimator
    max_new_tokens: int

    def compute_advantages(self, batch: Batch) -> ComputedAdvantages:
        """Advantages by token. Raises NonFiniteError on a reward that is not finite."""
        per_sample = self.estimator.advantages(batch)
        advantages = token_advantages(self.section, batch, per_sample, max_new_tokens=self.max_new_tokens)
        if self.section.zero_variance == "keep":
            return ComputedAdvantages(advantages=advantages, trained=None)
        trained = informative_samples(batch, per_sample)
        # A batch without any contrast still makes its step, of nothing: the schedule counts steps.
        return ComputedAdvantages(advantages=advantages, trained=trained if trained.any() else None)
