"""What an objective makes of a scored step: prepared once, then its micro-batches in a given layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from precision.objectives.base import Objective, Prepared, ScoredStep, StepContext, TokenBatch

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
