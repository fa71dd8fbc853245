"""The KL to a reference against exact enumeration: the value and the gradient that each estimator has."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from precision.objectives.cispo import CISPO
from precision.objectives.objective import StepContext, TokenBatch
from precision.reference import NearReference, ReferenceSection, reference_kl

LOGITS = torch.tensor([0.4, -0.3, 0.9, -1.1], dtype=torch.float64)
REFERENCE = torch.tensor([-0.2, 0.5, 0.1, 0.3], dtype=torch.float64).log_softmax(0)
ENGINE = torch.tensor([0.1, 0.2, 0.3, -0.5], dtype=torch.float64).log_softmax(0)
ESTIMATORS = get_args(ReferenceSection.model_fields["estimator"].annotation)


def exact(forward: bool) -> Tensor:
    """Gradient in the logits of KL(pi || pi_ref), or of KL(pi_ref || pi)."""
    logits = LOGITS.clone().requires_grad_()
    policy = logits.log_softmax(0)
    kl = (REFERENCE.exp() * (REFERENCE - policy)) if forward else (policy.exp() * (policy - REFERENCE))
    return torch.autograd.grad(kl.sum(), logits)[0]


def estimated(estimator: Any, sampler: Tensor) -> tuple[float, Tensor]:
    """Mean value, and gradient in the logits, over all tokens with the sampler's probabilities."""
    logits = LOGITS.clone().requires_grad_()
    policy = logits.log_softmax(0)
    ratios = (policy - sampler).exp().detach()
    section = ReferenceSection(coefficient=1.0, estimator=estimator)
    mean = (sampler.exp() * reference_kl(policy - REFERENCE, ratios, section)).sum()
    return mean.item(), torch.autograd.grad(mean, logits)[0]


def test_which_gradient_each_estimator_has() -> None:
    own = LOGITS.log_softmax(0)
    torch.testing.assert_close(estimated("k2", own)[1], exact(forward=False))
    torch.testing.assert_close(estimated("k3", own)[1], exact(forward=True))
    for sampler in (own, ENGINE):
        torch.testing.assert_close(estimated("importance", sampler)[1], exact(forward=False))
    assert not torch.allclose(estimated("k2", ENGINE)[1], exact(forward=False), atol=1e-2)


def test_which_value_each_estimator_has() -> None:
    own = LOGITS.log_softmax(0)
    kl = float((own.exp() * (own - REFERENCE)).sum())
    assert estimated("k3", own)[0] == pytest.approx(kl)
    assert estimated("importance", ENGINE)[0] == pytest.approx(kl)
    assert estimated("k2", own)[0] == pytest.approx(float((own.exp() * (own - REFERENCE).square() / 2).sum()))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_policies_add_nothing(estimator: Any) -> None:
    section = ReferenceSection(coefficient=1.0, estimator=estimator)
    same = torch.zeros(3, requires_grad=True)
    value = reference_kl(same, torch.ones(3), section)
    assert value.tolist() == [0.0] * 3
    assert torch.autograd.grad(value.sum(), same)[0].tolist() == [0.0] * 3


def test_the_term_is_a_mean_over_the_steps_tokens_beside_the_objective() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    values = dict(rollout_logprobs=torch.full((1, 3), -2.0), advantages=torch.ones(1, 3))
    mask = torch.tensor([[True, True, False]])
    reference = torch.tensor([[-1.5, -1.5, torch.nan]])
    batch = TokenBatch(**values, mask=mask, reference_logprobs=reference)
    context = StepContext(num_tokens=10)
    section = ReferenceSection(coefficient=0.5)
    near = NearReference(inner=CISPO(), reference=section)
    loss, sums = near.loss(logprobs, batch, context)
    plain, _ = CISPO().loss(logprobs, TokenBatch(**values, mask=mask), context)
    k3 = sum(torch.expm1(torch.tensor(-x)).item() + x for x in (0.5, -0.5))
    assert (loss - plain).item() == pytest.approx(0.5 * k3 / 10, abs=1e-6)
    assert float(sums["kl_to_reference"]) == pytest.approx(k3, abs=1e-6)
    assert float(sums["reference_loss"]) == pytest.approx(0.5 * k3, abs=1e-6)
    assert torch.isfinite(torch.autograd.grad(loss, logprobs)[0]).all()
    with pytest.raises(ValueError, match="reference_logprobs is None"):
        near.loss(logprobs, TokenBatch(**values, mask=mask), context)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_reference_may_find_a_token_as_unlikely_as_it_likes(estimator: Any) -> None:
    """It has not sampled it: such as the end token of a template that it never saw."""
    logprobs = torch.tensor([[-0.1, -0.2]], requires_grad=True)
    values = dict(rollout_logprobs=logprobs.detach(), advantages=torch.ones(1, 2), mask=torch.ones(1, 2).bool())
    for far, finite in ((-60.0, True), (-float("inf"), False), (float("nan"), False)):
        batch = TokenBatch(**values, reference_logprobs=torch.tensor([[-0.3, far]]))
        objective = NearReference(inner=CISPO(), reference=ReferenceSection(coefficient=0.1, estimator=estimator))
        if not finite:
            with pytest.raises(FloatingPointError, match=r"1 of 2 tokens .* reference"):
                objective.loss(logprobs, batch, StepContext(num_tokens=2))
            continue
        loss, _ = objective.loss(logprobs, batch, StepContext(num_tokens=2))
        assert torch.isfinite(loss)
        assert torch.isfinite(torch.autograd.grad(loss, logprobs)[0]).all()
