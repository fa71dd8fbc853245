"""What every objective takes and returns.

An objective is `(logprobs, batch, context) → (loss, sums)`: tensors of one micro-batch in, one scalar out. It knows no
rank, file or engine. Because the denominator is passed in, losses of micro-batches and ranks simply add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Response tokens of one micro-batch. All fields [batch, sequence]; where `mask` is False a field may hold
    anything (NaN, -inf, -120) without touching loss or gradient."""

    sampler_logprobs: Tensor
    """float32, natural log, of the engine that sampled."""
    advantages: Tensor
    """float32"""
    mask: Tensor
    """bool, True on response tokens."""


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """What a micro-batch cannot know by itself."""

    num_tokens: int
    """Response tokens of the whole optimizer step, over all micro-batches and ranks: the loss denominator."""
    step_ess: float | None = None
    """ESS of the whole step from the no-grad pass, for objectives with `needs_step_ess`."""
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums
    """All-reduces a float64 vector over data and context parallel ranks (identity in one process)."""


class Objective(Protocol):
    """`sums` holds detached scalars that add up over micro-batches and ranks; divided by `num_tokens` they are means.

    Raises FloatingPointError when a ratio under the mask is not finite.
    """

    @property
    def needs_step_ess(self) -> bool:
        """Whether a no-grad pass over the whole step must come first."""
        ...

    def __call__(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """`logprobs` is [batch, sequence] float32 with gradient: the learner's, for the sampled tokens."""
        ...
