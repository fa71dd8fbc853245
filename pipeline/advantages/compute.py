"""From a batch to the advantages of its samples, and from those to what each token of an optimizer step is weighed by.

    rewards ──length penalty──▶ estimator ──▶ advantages of samples ──normalized over the batch──▶ aggregation over the
                                                                                                    tokens of a step

A sample whose verifier failed has no reward: it is no member of its group, and a group without any other is no part of
the step. A truncated one may be left out of the loss (`advantage.truncated`: DAPO's overlong filtering); its reward
counts in its group all the same.

Groups of equal rewards have no advantage, hence no policy gradient. What becomes of them is the recipe's choice,
`advantage.zero_variance`:

    keep      they are trained on like the others
    skip      they (and whatever other group has no advantage) are not run through the model, but count in every
              denominator and statistic: same gradient, less work
    exclude   they are no part of the step: the others are trained on as if these had never been sampled. This is the
              loss of ScaleRL (arXiv 2510.13786, J_ScaleRL), whose sums run over prompts with 0 < mean(r) < 1 only
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline.advantages.aggregation import batch_normalized, token_advantages
from pipeline.advantages.base import Advantage, AdvantageEstimator
from pipeline.advantages.distillation import Distillation, taught
from pipeline.advantages.groups import Grouped
from pipeline.advantages.overlong import OverlongPenalty
from pipeline.data.batch import SOLVED_REWARD, Batch

if TYPE_CHECKING:
    from pipeline.config.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class SampleAdvantages:
    """The advantages of a batch, before they are given to tokens."""

    values: NDArray[np.float64]
    """[samples] normalized, where the recipe says so."""
    in_loss: NDArray[np.bool_]
    """[samples] True where the sample is part of an optimizer step, its denominators and statistics; whole groups, at
    least one."""
    through_model: NDArray[np.bool_]
    """[samples] True where the sample is run through the model if it is in the loss."""
    filtered: NDArray[np.bool_]
    """[samples] True where nothing is learned from the sample, although it has a reward: it was truncated."""


@dataclass(frozen=True, kw_only=True)
class AdvantageComputer:
    """The advantage section of a recipe at work."""

    section: Advantage
    estimator: AdvantageEstimator
    max_new_tokens: int
    overlong: OverlongPenalty | None = None
    """What long responses lose; None: nothing."""
    distillation: Distillation | None = None
    """What a teacher adds to each token; None: there is none."""
    solved_at: float = SOLVED_REWARD
    """The reward of a sample that solved its problem. Formulas that ask what is solved compare with 1: they get the
    rewards in units of it."""

    @staticmethod
    def of(recipe: Recipe) -> AdvantageComputer:
        """Return the recipe's advantages, from rewards to tokens."""
        return AdvantageComputer(
            section=recipe.advantage,
            estimator=recipe.advantage.estimator(),
            max_new_tokens=recipe.rollout.max_new_tokens,
            overlong=recipe.reward.overlong,
            solved_at=recipe.reward.solved_at,
            distillation=recipe.distillation,
        )

    def compute_advantages(self, batch: Batch) -> SampleAdvantages:
        """Advantages of the samples of a whole batch. Raises NonFiniteError on a reward that is not finite."""
        judged = self._judged(batch)
        filtered = self._filtered(batch, judged)
        values, deviation = np.zeros(batch.num_samples), np.zeros(batch.num_samples)
        reward, group = self._rewards(batch)[judged], batch.group[judged]
        if self.distillation is None or not self.distillation.judges_alone:
            values[judged] = self.estimator.advantages(reward, group)
        deviation[judged] = Grouped.of(reward, group).deviation
        learned = judged & ~filtered
        if not learned.any():  # a batch of truncated samples alone makes its step all the same, without any advantage
            values[:], filtered = 0.0, np.zeros_like(filtered)
        everything = np.ones(batch.num_samples, np.bool_)
        groups = Grouped.of(values, batch.group)
        contrasted, known = groups.any_member(deviation != 0.0), groups.any_member(learned)
        # A batch without any advantage still makes its step, by momentum and weight decay alone: versions count steps.
        wanted = contrasted & known if self.section.zero_variance == "exclude" else known
        in_loss = next(chosen for chosen in (wanted, known, everything) if chosen.any())
        weighed = groups.any_member(values != 0.0) if self.section.zero_variance == "skip" else everything
        return SampleAdvantages(
            values=batch_normalized(values, in_loss & judged) if self.section.batch_normalized else values,
            in_loss=in_loss,
            through_model=weighed & ~filtered,
            filtered=filtered,
        )

    def overlong_penalty(self, batch: Batch) -> NDArray[np.float32]:
        """[samples] what the length of each response adds to its reward, 0 or less; 0 where it has no reward."""
        if self.overlong is None:
            return np.zeros(batch.num_samples, np.float32)
        penalty = self.overlong.of(batch.response_lengths, max_new_tokens=self.max_new_tokens)
        return np.where(batch.judged, penalty, np.float32(0.0))

    def measured(self, batch: Batch) -> dict[str, float]:
        """Of the batch: the mean penalty for length, where there is one."""
        return {} if self.overlong is None else {"overlong_penalty": float(self.overlong_penalty(batch).mean())}

    def _rewards(self, batch: Batch) -> NDArray[np.float32]:
        if self.section.asks_what_is_solved:
            return batch.reward / np.float32(self.solved_at)
        return batch.reward if self.overlong is None else batch.reward + self.overlong_penalty(batch)

    def _filtered(self, batch: Batch, judged: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """[samples] those with a reward of which nothing is learned."""
        return batch.truncated & judged if self.section.truncated == "exclude" else np.zeros_like(judged)

    def _judged(self, batch: Batch) -> NDArray[np.bool_]:
        """[samples] those with a reward that the teacher, if there is one, scored; of groups that have as many of them
        as the formula needs. A group of fewer samples than that, all of this kind, is left to the formula."""
        if self.distillation is not None and self.distillation.judges_alone:
            return taught(batch)
        judged = batch.judged & taught(batch)
        groups = Grouped.of(judged.astype(np.float64), batch.group)
        complete = ~groups.any_member(~judged)
        enough = groups.total(judged)[groups.members] >= self.section.smallest_group
        return np.asarray(judged & (complete | enough))

    def by_token(self, step: Batch, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """[responses] what the tokens of one optimizer step are trained with, from `values` [samples] of the same
        samples; 0 on tokens that no engine sampled."""
        by_sample, by_token = values, None
        if self.distillation is not None:
            by_sample, by_token = self.distillation.reward_coefficient * values, self.distillation.added(step)
        return token_advantages(self.section.aggregation, step, by_sample, by_token, max_new_tokens=self.max_new_tokens)
