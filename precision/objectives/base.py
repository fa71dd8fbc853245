"""What every objective takes and returns.

An objective is `(logprobs, batch, context) → (loss, sums)`: tensors of one micro-batch in, one scalar out. It knows no
rank, file or engine. Because the denominator is passed in, losses of micro-batches and ranks simply add up.

What concerns whole responses or the whole step (effective sample size, vetoes, sequence ratios) cannot be seen from a
micro-batch. An objective that needs it has the step scored first, without gradients, and decides in `prepare`, once,
on flat tensors that are the same on every rank: so neither layout nor micro-batch size can change the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Response tokens of one micro-batch. All fields [batch, sequence]; where `mask` is False a field may hold
    anything (NaN, -inf, -120) without touching loss or gradient."""

    rollout_logprobs: Tensor
    """float32, natural log, of the engine that sampled."""
    advantages: Tensor
    """float32; for objectives with `needs_scoring`, those of `Prepared`."""
    mask: Tensor
    """bool, True on response tokens that were sampled."""
    anchor_logprobs: Tensor | None = None
    """float32, `Prepared.anchor_logprobs`; None for objectives that prepare none."""


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """What a micro-batch cannot know by itself."""

    num_tokens: int
    """Sampled response tokens of the whole optimizer step, over all micro-batches and ranks: the loss denominator."""
    step_ess: float | None = None
    """`Prepared.step_ess`."""
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums
    """All-reduces a float64 vector over data and context parallel ranks (identity in one process)."""


@dataclass(frozen=True, kw_only=True)
class ScoredStep:
    """The response tokens of a whole step, flat [tokens], response after response.

    What stands where `sampled` is False (tokens that were put into a response, not sampled) must touch no result.
    """

    logprobs: Tensor
    """float32 [tokens], natural log: the learner's at the weights that the step is about to change."""
    rollout_logprobs: Tensor
    """float32 [tokens], of the engine that sampled."""
    old_logprobs: Tensor
    """float32 [tokens], the learner's own when its stage began (pi_old); `logprobs` where a stage is one step."""
    advantages: Tensor
    """float32 [tokens]"""
    sampled: Tensor
    """bool [tokens]"""
    row: Tensor
    """int64 [tokens], the response that a token belongs to."""
    position: Tensor
    """int64 [tokens], its place within that response, from 0."""
    num_rows: int

    def row_sum(self, values: Tensor) -> Tensor:
        """float64 [num_rows]: `values` [tokens] (bool counts) summed over the sampled tokens of each response."""
        kept = torch.where(self.sampled, values.double(), 0.0)
        return torch.zeros(self.num_rows, dtype=torch.float64, device=kept.device).index_add_(0, self.row, kept)

    def row_mean(self, values: Tensor) -> Tensor:
        """float64 [num_rows]: the mean over sampled tokens; 0 for a response without any."""
        return self.row_sum(values) / self.row_sum(self.sampled).clamp(min=1.0)

    def log_ratios(self, upper: Tensor, lower: Tensor) -> Tensor:
        """float64 [tokens]: upper - lower, 0 where not sampled.

        Raises FloatingPointError when one under the mask is not finite.
        """
        difference = torch.where(self.sampled, upper.double() - lower.double(), 0.0)
        if not bool(difference.isfinite().all()):
            broken = int((~difference.isfinite()).sum())
            raise FloatingPointError(
                f"{broken} of {int(self.sampled.sum())} tokens have a log-ratio that is not finite; compare the "
                "learner's and the sampler's logprobs of this batch"
            )
        return difference


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What an objective decided about the whole step before its first micro-batch."""

    advantages: Tensor
    """float32 [tokens]. A veto, a correction or a sequence weight is a non-negative factor on the advantage, so it
    never touches the denominator."""
    anchor_logprobs: Tensor | None = None
    """float32 [tokens], what the ratio divides by where that is not the sampler."""
    step_ess: float | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    """Shares and means over the step, by the name that metrics use."""


class Objective(Protocol):
    """`sums` holds detached scalars that add up over micro-batches and ranks; divided by `num_tokens` they are means.

    Raises FloatingPointError when a ratio under the mask is not finite.
    """

    @property
    def needs_scoring(self) -> bool:
        """Whether a no-grad pass over the whole step, and `prepare`, must come first."""
        ...

    def prepare(self, step: ScoredStep) -> Prepared:
        """Decide what concerns whole responses or the whole step. Called only with `needs_scoring`."""
        ...

    def __call__(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """`logprobs` is [batch, sequence] float32 with gradient: the learner's, for the sampled tokens."""
        ...


class Unscored:
    """Base of the objectives that need nothing but their micro-batch."""

    @property
    def needs_scoring(self) -> bool:
        return False

    def prepare(self, step: ScoredStep) -> Prepared:
        """The advantages as they are."""
        return Prepared(advantages=step.advantages)
