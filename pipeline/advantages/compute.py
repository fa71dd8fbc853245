"""From a batch to the advantages of its samples, and from those to what each token of an optimizer step is weighed by.

    rewards ──length penalty──▶ estimator ──▶ advantages of samples ──normalized over the batch──▶ aggregation over the
                                                                                                    tokens of a step

A sample whose verifier failed has no reward: it is no member of its group, and a group without any other is no part of
the step. A truncated one may be left out of the loss (`advantage.truncated`: DAPO's overlong filtering); its reward
counts in its group all the same.

Groups of equal rewards have no advantage, hence no policy gradient. The recipe chooses (`advantage.zero_variance`):

    keep      they are trained on like the others
    skip      they (and other groups without any advantage) are not run through the model, but count in every
              denominator and statistic: same gradient, less work
    exclude   they are no part of the step: the others are trained on as if these had never been sampled. This is the
              loss of ScaleRL (arXiv 2510.13786, J_ScaleRL), whose sums run over prompts with 0 < mean(r) < 1 only
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline.advantages.methods import Advantage, AdvantageEstimator, Distillation, Grouped, OverlongPenalty
from pipeline.data.batch import SOLVED_REWARD, TEACHER_FAILED, Batch
from pipeline.errors import StoreError
from precision.objectives.base import Aggregation

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
    """Takes from the rewards of long responses; None: nothing does."""
    distillation: Distillation | None = None
    """Adds a teacher's judgment of each token; None: there is no teacher."""
    solved_at: float = SOLVED_REWARD
    """The reward of a sample that solved its problem. Formulas that ask whether it did compare with 1: they get the
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
        """Compute those of the samples of a whole batch. Raises NonFiniteError on a reward that is not finite."""
        section, everything = self.section, np.ones(batch.num_samples, np.bool_)
        # True where the sample has a reward, and the teacher, if there is one, scored it; in groups with as many such
        # samples as the formula needs. A group of fewer samples, all of this kind, is left to the formula.
        by_teacher = self.distillation is not None and self.distillation.judges_alone
        judged = taught(batch)
        if not by_teacher:
            judged = batch.judged & judged
            groups = Grouped(judged.astype(np.float64), batch.group)
            enough = groups.total(judged)[groups.members] >= section.smallest_group
            judged = np.asarray(judged & (~groups.any_member(~judged) | enough))
        filtered = batch.truncated & judged if section.truncated == "exclude" else ~everything
        if section.asks_what_is_solved:
            rewards = batch.reward / np.float32(self.solved_at)
        else:
            rewards = batch.reward if self.overlong is None else batch.reward + self.overlong_penalty(batch)
        values, deviation = np.zeros(batch.num_samples), np.zeros(batch.num_samples)
        reward, group = rewards[judged], batch.group[judged]
        if not by_teacher:
            values[judged] = self.estimator.advantages(reward, group)
        deviation[judged] = Grouped(reward, group).deviation
        learned = judged & ~filtered
        if not learned.any():  # a batch of truncated samples alone makes its step all the same, without any advantage
            values[:], filtered = 0.0, ~everything
        groups = Grouped(values, batch.group)
        contrasted, known = groups.any_member(deviation != 0.0), groups.any_member(learned)
        # A batch without any advantage still makes its step, by momentum and weight decay alone: versions count steps.
        wanted = contrasted & known if section.zero_variance == "exclude" else known
        in_loss = next(chosen for chosen in (wanted, known, everything) if chosen.any())
        weighed = groups.any_member(values != 0.0) if section.zero_variance == "skip" else everything
        return SampleAdvantages(
            values=batch_normalized(values, in_loss & judged) if section.batch_normalized else values,
            in_loss=in_loss,
            through_model=weighed & ~filtered,
            filtered=filtered,
        )

    def overlong_penalty(self, batch: Batch) -> NDArray[np.float32]:
        """[samples] the addition to each reward for the response's length, 0 or less; 0 where there is no reward."""
        if self.overlong is None:
            return np.zeros(batch.num_samples, np.float32)
        penalty = self.overlong.of(batch.response_lengths, max_new_tokens=self.max_new_tokens)
        return np.where(batch.judged, penalty, np.float32(0.0))

    def measured(self, batch: Batch) -> dict[str, float]:
        """Return the mean penalty for length of a batch, where there is one, by the name of its metric."""
        return {} if self.overlong is None else {"overlong_penalty": float(self.overlong_penalty(batch).mean())}

    def by_token(self, step: Batch, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """[responses] the weights of the tokens of one optimizer step, from `values` [samples] of the same samples; 0
        on tokens that no engine sampled."""
        by_sample, by_token = values, None
        if self.distillation is not None:
            by_sample = self.distillation.reward_coefficient * values
            by_token = -self.distillation.coefficient * reverse_kl(step)
        return token_advantages(self.section.aggregation, step, by_sample, by_token, max_new_tokens=self.max_new_tokens)


def token_advantages(
    aggregation: Aggregation,
    step: Batch,
    values: NDArray[np.float64],
    of_tokens: NDArray[np.float64] | None = None,
    *,
    max_new_tokens: int,
) -> NDArray[np.float64]:
    """[responses] the advantages of the tokens of a step, from the `values` [samples] of their samples and those that
    tokens have beside them, `of_tokens` [responses]; 0 where no engine sampled.

    An objective averages over the N sampled tokens of an optimizer step. A factor on the advantages turns that mean
    into another one, because every policy term is linear in the advantage; terms without an advantage (a KL anchor)
    stay token means. N, R, P and the samples are those of the step: of the batch, or of a part of it.

        token     1                     every token alike (DAPO, arXiv 2503.14476)
        sequence  N / (R n_i)           every response alike (GRPO, arXiv 2402.03300, eq. 3); n_i its tokens, R
                                        responses
        prompt    N / (P n_g)           every prompt alike, its tokens alike (ScaleRL, arXiv 2510.13786); n_g its tokens
        constant  N / (R L)             the sum over tokens by a constant: responses times the longest, L =
                                        `max_new_tokens` (Dr. GRPO, arXiv 2503.20783)

    The first three sum to N over the tokens; `constant` does only when every response is of the greatest length, which
    is its point: a long response then counts more, and a short batch takes a shorter step.
    """
    ends = np.concatenate([[0], np.cumsum(step.loss_mask)])[step.response_offsets]
    lengths = np.diff(ends).astype(np.float64)
    num_tokens = lengths.sum()
    if aggregation == "token":
        factors = np.ones(step.num_samples)
    elif aggregation == "constant":
        factors = np.full(step.num_samples, num_tokens / max(1, np.count_nonzero(lengths) * max_new_tokens))
    else:
        _, part = np.unique(
            np.arange(step.num_samples) if aggregation == "sequence" else step.group, return_inverse=True
        )
        part_lengths = np.bincount(part, lengths)
        # A response without any sampled token is no part of the mean: the factors must sum to N.
        num_parts = max(1, np.count_nonzero(part_lengths))
        factors = np.asarray(num_tokens / (num_parts * np.maximum(part_lengths, 1.0))[part])
    sample = np.repeat(np.arange(step.num_samples), step.response_lengths)
    advantages = values[sample] if of_tokens is None else values[sample] + of_tokens
    return np.where(step.loss_mask, advantages * factors[sample], 0.0)


def batch_normalized(values: NDArray[np.float64], counted: NDArray[np.bool_]) -> NDArray[np.float64]:
    """`values` [samples] divided by the standard deviation (samples - 1 in the denominator) of those that are
    `counted` [samples] (ScaleRL, arXiv 2510.13786, recipe: A^norm). Values that are all equal stay as they are."""
    kept = values[counted]
    std = float(np.std(kept, ddof=1)) if len(kept) > 1 else 0.0
    return values / std if std > 0.0 else values


def reverse_kl(batch: Batch) -> NDArray[np.float64]:
    """[responses] log pi_b - log pi_teacher, nats; 0 where no engine sampled. Raises StoreError for a batch without the
    teacher's log-probabilities."""
    if batch.teacher_logprobs is None:
        raise StoreError(
            f"batch {batch.index} has no log-probabilities of a teacher: it was collected without the recipe's section "
            "distillation; begin another run.name"
        )
    difference = batch.rollout_logprobs.astype(np.float64) - batch.teacher_logprobs
    return np.where(batch.loss_mask, difference, 0.0)


def taught(batch: Batch) -> NDArray[np.bool_]:
    """[samples] False where the teacher of a distillation did not score the sample."""
    failed = batch.reward_parts.get(TEACHER_FAILED)
    return np.ones(batch.num_samples, np.bool_) if failed is None else np.isnan(failed) | (failed == 0.0)


def mean_reverse_kl(batch: Batch) -> float:
    """Nats a sampled token: the estimate of KL(pi_b || teacher) from the tokens themselves, of either sign."""
    return float(reverse_kl(batch).sum()) / max(1, batch.num_sampled_tokens)
