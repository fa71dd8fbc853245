from __future__ import annotations

import math

import pytest
import torch

from precision.objectives.cispo import CISPO
from precision.objectives.objective import StepContext, TokenBatch

RATIOS = torch.tensor([[0.5, 1.0, 4.0, 8.0, 8.0]], dtype=torch.float64)
ADVANTAGES = torch.tensor([[2.0, -1.0, 1.0, 1.0, -3.0]], dtype=torch.float64)
WEIGHTS = [0.5, 1.0, 4.0, 5.0, 5.0]  # min(rho, 5)


def batch_of(ratios: torch.Tensor) -> tuple[torch.Tensor, TokenBatch]:
    rollout = torch.full_like(ratios, -3.0)
    batch = TokenBatch(rollout_logprobs=rollout, advantages=ADVANTAGES, mask=torch.ones_like(ratios, dtype=torch.bool))
    return (rollout + ratios.log()).requires_grad_(), batch


def test_by_hand() -> None:
    logprobs, batch = batch_of(RATIOS)
    loss, sums = CISPO(cap=5.0).loss(logprobs, batch, StepContext(num_tokens=10))
    loss.backward()  # type: ignore[no-untyped-call]
    # -1/10 sum min(rho, 5) A log pi, log pi = -3 + log rho
    terms = [w * a * (math.log(r) - 3) for w, a, r in zip(WEIGHTS, *map(list_of, (ADVANTAGES, RATIOS)), strict=True)]
    assert loss.item() == pytest.approx(-sum(terms) / 10, rel=1e-12)
    assert logprobs.grad is not None
    # the weight is held still: the slope in log pi is -min(rho, 5) A / 10, also above the cap
    assert list_of(logprobs.grad) == pytest.approx([-0.1, 0.1, -0.4, -0.5, 1.5], rel=1e-12)
    assert (sums["cap_hits"], sums["weight"]) == (2, sum(WEIGHTS))
    assert float(sums["k3"]) == pytest.approx(sum(r - 1 - math.log(r) for r in list_of(RATIOS)), rel=1e-12)
    assert not CISPO().facts.needs_scoring


def list_of(tensor: torch.Tensor) -> list[float]:
    values: list[float] = tensor[0].tolist()
    return values
