"""Compute the advantages of a batch's samples, and of the tokens of an optimizer step.

    rewards ──length penalty──▶ estimator ──▶ advantages of samples ──normalized over the batch──▶ aggregation over the
                                                                                                    tokens of a step

Everything here goes by episode, not by row: an episode counts once, with all tokens that were sampled in its rows, and
what is said of samples is said of episodes. Where each sample has one turn, the two are the same.

A sample whose verifier failed has no reward and is left out of its group; a group without any reward is left out of the
step. A truncated sample may be left out of the loss (`advantage.truncated`: DAPO's overlong filtering); its reward
still counts in its group. Groups of equal rewards have no advantage, hence no policy gradient. The recipe chooses what
becomes of them (`advantage.zero_variance`):

    keep      they are trained on like the others
    skip      they (and other groups without any advantage) are not run through the model, but count in every
              denominator and statistic: same gradient, less work
    exclude   they are left out of the step, as if they had never been sampled: the loss of ScaleRL (arXiv 2510.13786,
              J_ScaleRL), whose sums run over prompts with 0 < mean(r) < 1 only
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline.advantages.methods import Advantage, AdvantageEstimator, Distillation, Grouped, OverlongPenalty
from pipeline.data.batch import SOLVED_REWARD, TEACHER_FAILED, Batch
from pipeline.errors import StoreError
from precision.objectives.objective import Aggregation

if TYPE_CHECKING:
    from pipeline.config.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class SampleAdvantages:
    """The advantages of a batch's samples, before aggregation over tokens; alike on all rows of an episode."""

    values: NDArray[np.float64]
    """Advantages [samples], normalized where the recipe asks for it."""
    in_loss: NDArray[np.bool_]
    """Mask [samples] of the samples in a step, its denominators and its statistics: whole groups, at least one."""
    through_model: NDArray[np.bool_]
    """Mask [samples] of the samples to run through the model, if they are in the loss."""
    filtered: NDArray[np.bool_]
    """Mask [samples] of truncated samples that nothing is learned from, although they have a reward."""


@dataclass(frozen=True, kw_only=True)
class AdvantageComputer:
    """A recipe's advantage formula, with its length penalty and its distillation."""

    section: Advantage
    estimator: AdvantageEstimator
    max_new_tokens: int
    overlong: OverlongPenalty | None = None
    """Penalty on the rewards of long responses; None: no penalty."""
    distillation: Distillation | None = None
    """Settings of the teacher that scores each token; None: no teacher."""
    solved_at: float = SOLVED_REWARD
    """Reward of a sample that solved its problem. Formulas that compare rewards with 1 get them divided by this."""

    @staticmethod
    def of(recipe: Recipe) -> AdvantageComputer:
        """Return the advantage computation of a recipe."""
        return AdvantageComputer(
            section=recipe.advantage,
            estimator=recipe.advantage.estimator(),
            max_new_tokens=recipe.most_sampled_tokens,
            overlong=recipe.reward.overlong,
            solved_at=recipe.reward.solved_at,
            distillation=recipe.distillation,
        )

    def compute_advantages(self, batch: Batch) -> SampleAdvantages:
        """Return the advantages of a whole batch's samples. Raises NonFiniteError on a reward that is not finite."""
        section, everything = self.section, np.ones(batch.num_episodes, np.bool_)
        first, group = batch.first_rows, batch.group[batch.first_rows]
        # Keep samples with a reward and, if there is a teacher, its scores. Drop a group that lost samples and has too
        # few left for the formula; leave a small group that lost none to the formula.
        by_teacher = self.distillation is not None and self.distillation.judges_alone
        judged = taught(batch)[first]
        if not by_teacher:
            judged = batch.judged[first] & judged
            groups = Grouped(judged.astype(np.float64), group)
            enough = groups.total(judged)[groups.members] >= section.smallest_group
            judged = np.asarray(judged & (~groups.any_member(~judged) | enough))
        filtered = batch.truncated[first] & judged if section.truncated == "exclude" else ~everything
        rewards = batch.reward[first]
        if section.asks_what_is_solved:
            rewards = rewards / np.float32(self.solved_at)
        elif self.overlong is not None:
            rewards = rewards + self.overlong_penalty(batch)
        values, deviation = np.zeros(batch.num_episodes), np.zeros(batch.num_episodes)
        if not by_teacher:
            values[judged] = self.estimator.advantages(rewards[judged], group[judged])
        deviation[judged] = Grouped(rewards[judged], group[judged]).deviation
        learned = judged & ~filtered
        if not learned.any():  # a batch of truncated samples alone makes its step all the same, without any advantage
            values[:], filtered = 0.0, ~everything
        groups = Grouped(values, group)
        contrasted, known = groups.any_member(deviation != 0.0), groups.any_member(learned)
        # A batch without any advantage still makes its step, by momentum and weight decay alone: versions count steps.
        wanted = contrasted & known if section.zero_variance == "exclude" else known
        in_loss = wanted if wanted.any() else known if known.any() else everything
        weighed = groups.any_member(values != 0.0) if section.zero_variance == "skip" else everything
        values = batch_normalized(values, in_loss & judged) if section.batch_normalized else values
        return SampleAdvantages(
            values=values[batch.episode],
            in_loss=in_loss[batch.episode],
            through_model=(weighed & ~filtered)[batch.episode],
            filtered=filtered[batch.episode],
        )

    def overlong_penalty(self, batch: Batch) -> NDArray[np.float32]:
        """Return the addition to each reward for the answer's length [episodes]: 0 or less, and 0 without a reward."""
        if self.overlong is None:
            return np.zeros(batch.num_episodes, np.float32)
        penalty = self.overlong.of(batch.answer_lengths, max_new_tokens=self.max_new_tokens)
        return np.where(batch.judged[batch.first_rows], penalty, np.float32(0.0))

    def measured(self, batch: Batch) -> dict[str, float]:
        """Return the batch's mean length penalty by the name of its metric; empty without a penalty."""
        return {} if self.overlong is None else {"overlong_penalty": float(self.overlong_penalty(batch).mean())}

    def by_token(self, step: Batch, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the advantages [response tokens] of the tokens of an optimizer step, from the `values` [samples] of
        the same samples; 0 where no engine sampled."""
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
    """Return the advantages [response tokens] of a step's tokens, weighted for a mean by `aggregation`.

    `values` [samples] are the advantages of samples, `of_tokens` [response tokens] further advantages of single tokens.
    The result is 0 where no engine sampled. An objective averages over the N sampled tokens of an optimizer step. A
    factor on the advantages turns that mean into another, because every policy term is linear in the advantage; terms
    without an advantage (a KL anchor) stay token means. N, R, P and the samples are those of the step alone.

        token     1             every token alike (DAPO, arXiv 2503.14476)
        sequence  N / (R n_i)   every response alike (GRPO, arXiv 2402.03300, eq. 3); R responses of n_i tokens
        prompt    N / (P n_g)   every prompt alike, its tokens alike (ScaleRL, arXiv 2510.13786); P prompts, n_g tokens
        constant  N / (R L)     the sum over tokens divided by R times the longest response, L = `max_new_tokens` (Dr.
                                GRPO, arXiv 2503.20783)

    The first three sum to N over the tokens. `constant` does only when every response has L tokens. By design, a long
    response then counts more, and a short batch takes a shorter step.
    """
    ends = np.concatenate([[0], np.cumsum(step.loss_mask)])[step.episode_offsets]
    lengths = np.diff(ends).astype(np.float64)
    num_tokens = lengths.sum()
    if aggregation == "token":
        factors = np.ones(step.num_episodes)
    elif aggregation == "constant":
        factors = np.full(step.num_episodes, num_tokens / max(1, np.count_nonzero(lengths) * max_new_tokens))
    else:
        units = np.arange(step.num_episodes) if aggregation == "sequence" else step.group[step.first_rows]
        _, part = np.unique(units, return_inverse=True)
        part_lengths = np.bincount(part, lengths)
        # A response without any sampled token is no part of the mean: the factors must sum to N.
        num_parts = max(1, np.count_nonzero(part_lengths))
        factors = np.asarray(num_tokens / (num_parts * np.maximum(part_lengths, 1.0))[part])
    episode = np.repeat(np.arange(step.num_episodes), np.diff(step.episode_offsets))
    of_episodes = values[step.first_rows][episode]
    advantages = of_episodes if of_tokens is None else of_episodes + of_tokens
    return np.where(step.loss_mask, advantages * factors[episode], 0.0)


def batch_normalized(values: NDArray[np.float64], counted: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Divide `values` [samples] by the standard deviation (ddof 1) over the `counted` [samples] (A^norm of ScaleRL,
    arXiv 2510.13786). If the counted values are all equal, return `values` unchanged."""
    kept = values[counted]
    std = float(np.std(kept, ddof=1)) if len(kept) > 1 else 0.0
    return values / std if std > 0.0 else values


def reverse_kl(batch: Batch) -> NDArray[np.float64]:
    """Return log pi_b - log pi_teacher [response tokens], nats; 0 where no engine sampled. Raises StoreError for a
    batch without the teacher's log-probabilities."""
    if batch.teacher_logprobs is None:
        raise StoreError(
            f"batch {batch.index} has no log-probabilities of a teacher: it was collected without the recipe's section "
            "distillation; begin another run.name"
        )
    difference = batch.rollout_logprobs.astype(np.float64) - batch.teacher_logprobs
    return np.where(batch.loss_mask, difference, 0.0)


def taught(batch: Batch) -> NDArray[np.bool_]:
    """Return a mask [samples] that is False where the teacher of a distillation failed to score the sample."""
    failed = batch.reward_parts.get(TEACHER_FAILED)
    return np.ones(batch.num_samples, np.bool_) if failed is None else np.isnan(failed) | (failed == 0.0)


def mean_reverse_kl(batch: Batch) -> float:
    """Return the estimate of KL(pi_b || teacher) from the sampled tokens, in nats a token; it may be negative."""
    return float(reverse_kl(batch).sum()) / max(1, batch.num_sampled_tokens)
