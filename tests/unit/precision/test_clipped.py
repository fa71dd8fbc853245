from __future__ import annotations

import math

import pytest
import torch

from precision.objectives import Clipped, StepContext, Supervised, TokenBatch

RATIOS = torch.tensor([[1.5, 1.1, 0.5, 1.5, 0.5, 0.9, 0.7, 1.4, 1.6]], dtype=torch.float64)
ADVANTAGES = torch.tensor([[2.0, 2.0, 2.0, -1.0, -1.0, -1.0, -2.0, 1.0, 1.0]], dtype=torch.float64)
# min(rho A, clip(rho, .8, 1.28) A): 1.28 * 2 = 2.56 (clipped), 2.2, 1.0, -1.5 (pessimistic), -.8 (clipped), -.9,
# -1.6 (clipped), 1.28 (clipped), 1.28 (clipped): three tokens clipped above, two below
SURROGATE = 2.56 + 2.2 + 1.0 - 1.5 - 0.8 - 0.9 - 1.6 + 1.28 + 1.28
# d(rho A)/d log pi = rho A where not clipped
SLOPES = [0.0, 2.2, 1.0, -1.5, 0.0, -0.9, 0.0, 0.0, 0.0]


def batch_of(ratios: torch.Tensor, advantages: torch.Tensor) -> tuple[torch.Tensor, TokenBatch]:
    sampler = torch.full_like(ratios, -2.0)
    batch = TokenBatch(sampler_logprobs=sampler, advantages=advantages, mask=torch.ones_like(ratios, dtype=torch.bool))
    return (sampler + ratios.log()).requires_grad_(), batch


def test_all_cases_by_hand() -> None:
    logprobs, batch = batch_of(RATIOS, ADVANTAGES)
    loss, sums = Clipped(clip_low=0.2, clip_high=0.28)(logprobs, batch, StepContext(num_tokens=12))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(-SURROGATE / 12, rel=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist()[0] == pytest.approx([-slope / 12 for slope in SLOPES], rel=1e-12)
    assert (sums["clip_hits"], sums["clip_hits_high"], sums["clip_hits_low"]) == (5, 3, 2)
    k3 = sum(r - 1 - math.log(r) for r in RATIOS.tolist()[0])
    assert float(sums["k3"]) == pytest.approx(k3, rel=1e-12)


def test_on_policy_gradient_is_the_score_function() -> None:
    logprobs, batch = batch_of(torch.ones_like(RATIOS), ADVANTAGES)
    loss, sums = Clipped()(logprobs, batch, StepContext(num_tokens=9))
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(logprobs.grad, -ADVANTAGES / 9)
    assert sums["clip_hits"] == 0
    assert not Clipped().needs_step_ess


@pytest.mark.parametrize(("low", "high"), [(-0.1, 0.2), (1.1, 0.2), (0.2, -0.1), (math.nan, 0.2)])
def test_bounds_out_of_range_are_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="expected clip_low in"):
        Clipped(clip_low=low, clip_high=high)


def test_supervised_is_cross_entropy_and_ignores_the_sampler() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -4.0]], requires_grad=True)
    batch = TokenBatch(
        sampler_logprobs=torch.full((1, 3), math.nan),
        advantages=torch.ones(1, 3),
        mask=torch.tensor([[True, True, False]]),
    )
    loss, sums = Supervised()(logprobs, batch, StepContext(num_tokens=2))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 1.5  # (1 + 2) / 2
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-0.5, -0.5, 0.0]]
    assert sums["nll"] == 3
    assert not Supervised().needs_step_ess
