"""Scored steps, by hand from rows of log-ratios or drawn by hypothesis, and what an objective makes of one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from precision.objectives.objective import Objective, Prepared, ScoredStep, StepContext, TokenBatch

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
    order = torch.randperm(len(step.offsets) - 1, generator=torch.Generator().manual_seed(seed))
    index = torch.cat([torch.nonzero(step.row == row).flatten() for row in order.tolist()])
    moved = {name: getattr(step, name)[index] for name in (*TOKEN_FIELDS, "sampled")}
    return dataclasses.replace(step, **moved, offsets=offsets_of(step.offsets.diff()[order])), index


Layout = Sequence[Tensor]
"""Micro-batches, each int64 [batch, sequence]: the flat place of each token, -1 for padding."""


@dataclass(frozen=True)
class Outcome:
    loss: float
    gradient: Tensor
    """[tokens], of the loss in the learner's log-probabilities"""
    sums: dict[str, float]
    prepared: Prepared


def run(objective: Objective, step: ScoredStep, layout: Layout | None = None) -> Outcome:
    """Padding holds NaN. Default layout: one row with all tokens."""
    prepared = objective.prepare(step) if objective.facts.needs_scoring else Prepared(advantages=step.advantages)
    context = StepContext(num_tokens=int(step.sampled.sum()), step_ess=prepared.step_ess)
    leaf = step.logprobs.clone().requires_grad_()
    loss, sums = torch.zeros((), dtype=leaf.dtype), dict[str, float]()
    for places in layout or [torch.arange(len(leaf)).unsqueeze(0)]:

        def laid_out(flat: Tensor, places: Tensor = places) -> Tensor:
            return torch.where(places >= 0, flat[places.clamp(min=0)], math.nan)

        anchor = prepared.anchor_logprobs
        batch = TokenBatch(
            rollout_logprobs=laid_out(step.rollout_logprobs),
            advantages=laid_out(prepared.advantages),
            mask=(places >= 0) & step.sampled[places.clamp(min=0)],
            anchor_logprobs=None if anchor is None else laid_out(anchor),
        )
        part, part_sums = objective.loss(laid_out(leaf), batch, context)
        loss = loss + part
        sums = {name: sums.get(name, 0.0) + float(value) for name, value in part_sums.items()}
    loss.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return Outcome(loss.item(), leaf.grad, sums, prepared)
