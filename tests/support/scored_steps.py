"""Scored steps for tests: by hand from rows of log-ratios, or drawn by hypothesis."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from precision.objectives.base import ScoredStep

ROLLOUT = -1.5
"""Every token's log-probability under the rollout, in steps built by hand."""
TOKEN_FIELDS = ("logprobs", "rollout_logprobs", "old_logprobs", "advantages")


def scored_step(
    log_ratios: Sequence[Sequence[float]],
    advantages: Sequence[float],
    *,
    old: Sequence[Sequence[float]] | None = None,
) -> ScoredStep:
    """One inner sequence and one advantage a response; `log_ratios` is log pi - log pi_b, `old` is log pi_prox -
    log pi_b and equals it by default. Float64, so that numbers worked out by hand can be met closely."""
    lengths = torch.tensor([len(row) for row in log_ratios])
    learner, prox = (
        torch.tensor([x for row in rows for x in row], dtype=torch.float64) for rows in (log_ratios, old or log_ratios)
    )
    return ScoredStep(
        logprobs=ROLLOUT + learner,
        rollout_logprobs=torch.full_like(learner, ROLLOUT),
        old_logprobs=ROLLOUT + prox,
        advantages=torch.tensor(advantages, dtype=torch.float64).repeat_interleave(lengths),
        sampled=torch.ones_like(learner, dtype=torch.bool),
        offsets=offsets_of(lengths),
    )


def offsets_of(lengths: Tensor) -> Tensor:
    """Where responses of these lengths begin, and where the last one ends."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


@st.composite
def scored_steps(draw: Any) -> ScoredStep:
    """Ragged responses with some forced tokens; mismatch from none to wild. At least one token is sampled."""
    lengths = torch.tensor(draw(st.lists(st.integers(1, 6), min_size=1, max_size=6)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    spread = draw(st.sampled_from([0.0, 0.01, 0.3, 3.0]))
    total = int(lengths.sum())

    def noise() -> Tensor:
        return torch.randn(total, generator=generator, dtype=torch.float64)

    rollout = -3 * torch.rand(total, generator=generator, dtype=torch.float64)
    old = rollout + spread * noise()
    sampled = torch.rand(total, generator=generator) < 0.8
    sampled[0] = True
    return ScoredStep(
        logprobs=old + 0.1 * spread * noise(),
        rollout_logprobs=rollout,
        old_logprobs=old,
        advantages=torch.randn(len(lengths), generator=generator, dtype=torch.float64).repeat_interleave(lengths),
        sampled=sampled,
        offsets=offsets_of(lengths),
    )


def soiled(step: ScoredStep, garbage: float) -> ScoredStep:
    """`garbage` in every field where no token was sampled."""
    kept = {name: torch.where(step.sampled, getattr(step, name), garbage) for name in TOKEN_FIELDS}
    return dataclasses.replace(step, **kept)


def reordered(step: ScoredStep, *, seed: int = 1) -> tuple[ScoredStep, Tensor]:
    """The same responses in another order, and the index with which per-token results of `step` follow them."""
    order = torch.randperm((len(step.offsets) - 1), generator=torch.Generator().manual_seed(seed))
    index = torch.cat([torch.nonzero(step.row == row).flatten() for row in order.tolist()])
    moved = {name: getattr(step, name)[index] for name in (*TOKEN_FIELDS, "sampled")}
    return dataclasses.replace(step, **moved, offsets=offsets_of(step.offsets.diff()[order])), index
