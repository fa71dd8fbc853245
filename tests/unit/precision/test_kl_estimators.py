"""Both estimators of KL(pi || pi_b) against exact enumeration on a small categorical: what each estimates, and what the
official one, fed samples from pi_b, does not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from precision.kl_estimators import importance_kl, official_kl

Estimator = Callable[[Tensor], Tensor]
ROLLOUT = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05], dtype=torch.float64)
SHIFT = torch.tensor([-0.9, 0.4, 1.1, -0.2, 0.6], dtype=torch.float64)
LOGITS = ROLLOUT.log() + SHIFT


def uncapped(log_ratios: Tensor) -> Tensor:
    return importance_kl(log_ratios, cap=math.inf)


def capped(log_ratios: Tensor) -> Tensor:
    return importance_kl(log_ratios, cap=0.5)


def capped_at_one(log_ratios: Tensor) -> Tensor:
    return importance_kl(log_ratios, cap=1.0)


def expectation(estimator: Estimator, logits: Tensor, *, under: Tensor) -> tuple[float, Tensor]:
    """Exact mean of K over samples from `under`, and the mean of its gradient in the learner's logits."""
    leaf = logits.clone().requires_grad_()
    # The weights are those of the sampling law, which no estimator sees: held still.
    mean = (under.detach() * estimator(leaf.log_softmax(0) - ROLLOUT.log())).sum()
    mean.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return mean.item(), leaf.grad


def exact(divergence: Callable[[Tensor], Tensor], logits: Tensor) -> tuple[float, Tensor]:
    """A divergence between the learner softmax(logits) and ROLLOUT, by enumeration, and its gradient."""
    leaf = logits.clone().requires_grad_()
    value = divergence(leaf.softmax(0))
    value.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return value.item(), leaf.grad


def reverse_kl(learner: Tensor) -> Tensor:
    """KL(pi || pi_b), the anchor that P3O's paper writes."""
    return (learner * (learner / ROLLOUT).log()).sum()


def chi2_minus_forward_kl(learner: Tensor) -> Tensor:
    """chi^2(pi_b || pi) - KL(pi_b || pi)"""
    return (ROLLOUT.square() / learner).sum() - 1 - (ROLLOUT * (ROLLOUT / learner).log()).sum()


def test_official_is_unbiased_for_samples_from_the_learner() -> None:
    value, _ = expectation(official_kl, LOGITS, under=LOGITS.softmax(0))
    assert value == pytest.approx(exact(reverse_kl, LOGITS)[0], rel=1e-12)


def test_official_from_sampler_samples_estimates_another_divergence() -> None:
    """In value and in gradient; with this mismatch it is off by more than a third."""
    value, gradient = expectation(official_kl, LOGITS, under=ROLLOUT)
    other, other_gradient = exact(chi2_minus_forward_kl, LOGITS)
    assert value == pytest.approx(other, rel=1e-12)
    torch.testing.assert_close(gradient, other_gradient, rtol=1e-12, atol=1e-14)
    wanted, _ = exact(reverse_kl, LOGITS)
    assert abs(value - wanted) > wanted / 3


def test_officials_bias_is_heavy_tailed() -> None:
    """As the learner drops a token of the engine's to p, KL(pi || pi_b) levels off; the estimate grows like 1 / p."""
    values = []
    for drop in (4.0, 6.0, 8.0):
        logits = ROLLOUT.log() - drop * torch.eye(5, dtype=torch.float64)[0]
        values.append((expectation(official_kl, logits, under=ROLLOUT)[0], exact(reverse_kl, logits)[0]))
    assert values[2][0] / values[1][0] == pytest.approx(math.exp(2.0), rel=0.05)
    assert values[2][1] / values[1][1] == pytest.approx(1.0, rel=0.05)


def test_importance_is_unbiased_in_value_and_uncapped_also_in_gradient() -> None:
    value, gradient = expectation(uncapped, LOGITS, under=ROLLOUT)
    wanted, wanted_gradient = exact(reverse_kl, LOGITS)
    assert value == pytest.approx(wanted, rel=1e-12)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-12, atol=1e-14)


def test_the_cap_of_importance_changes_the_gradient_only() -> None:
    value, gradient = expectation(capped, LOGITS, under=ROLLOUT)
    wanted, wanted_gradient = exact(reverse_kl, LOGITS)
    assert value == pytest.approx(wanted, rel=1e-12)
    assert gradient.norm() < wanted_gradient.norm()
    assert torch.cosine_similarity(gradient, wanted_gradient, dim=0) > 0.8


@pytest.mark.parametrize("estimator", [official_kl, capped_at_one])
def test_gradient_bias_vanishes_with_the_mismatch(estimator: Estimator) -> None:
    """The wrong sampling law of `official` and a cap of 1 both cost first order only."""
    biases = []
    for size in (0.1, 0.01, 0.001):
        logits = ROLLOUT.log() + size * SHIFT
        _, gradient = expectation(estimator, logits, under=ROLLOUT)
        _, wanted = exact(reverse_kl, logits)
        biases.append(float((gradient - wanted).norm() / wanted.norm()))
    assert biases[0] < 0.3
    assert biases[1] == pytest.approx(biases[0] / 10, rel=0.2)
    assert biases[2] == pytest.approx(biases[1] / 10, rel=0.2)


def gradient_at(estimator: Estimator, log_ratio: float) -> tuple[float, float]:
    leaf = torch.tensor(log_ratio, dtype=torch.float64, requires_grad=True)
    value = estimator(leaf)
    value.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return value.item(), leaf.grad.item()


def test_by_hand() -> None:
    # l = -ln 2: official -ln 2 + 2 - 1, slope 1 - 2. importance: -ln 2 / 2 - 1/2 + 1, slope -ln 2 / 2.
    assert gradient_at(official_kl, -math.log(2)) == pytest.approx((1 - math.log(2), -1.0), rel=1e-12)
    assert gradient_at(uncapped, -math.log(2)) == pytest.approx((0.5 - math.log(2) / 2, -math.log(2) / 2), rel=1e-12)
    # l = ln 3, cap .5: value 3 ln 3 - 2, slope .5 ln 3.
    assert gradient_at(capped, math.log(3)) == pytest.approx((3 * math.log(3) - 2, math.log(3) / 2), rel=1e-12)


def test_beyond_the_exponents_clip_a_vanishing_token_is_still_pulled_back() -> None:
    # l = -12: K = -12 + e^10 - 1; the slope stays 1 - e^10, where autograd of the clipped form says +1.
    assert gradient_at(official_kl, -12.0) == pytest.approx((-13 + math.exp(10), 1 - math.exp(10)), rel=1e-12)
    # l = 12: K = 12 + e^-10 - 1, slope 1 - e^-10.
    assert gradient_at(official_kl, 12.0) == pytest.approx((11 + math.exp(-10), 1 - math.exp(-10)), rel=1e-12)


@given(st.floats(-9.5, 9.5))
def test_slopes_are_the_derivatives(log_ratio: float) -> None:
    step = 1e-5
    for estimator in (official_kl, uncapped):
        _, slope = gradient_at(estimator, log_ratio)
        rise = gradient_at(estimator, log_ratio + step)[0] - gradient_at(estimator, log_ratio - step)[0]
        assert slope == pytest.approx(rise / (2 * step), rel=1e-5, abs=1e-6)


@given(st.floats(-9.5, 30.0))
def test_neither_is_ever_negative_and_both_are_zero_in_agreement(log_ratio: float) -> None:
    for estimator in (official_kl, uncapped):
        assert gradient_at(estimator, log_ratio)[0] >= 0.0
        assert gradient_at(estimator, 0.0) == (0.0, 0.0)


def test_small_mismatch_keeps_its_digits_in_float32() -> None:
    # K is l^2 / 2 to first order for both: 5e-9 at l = 1e-4, far below float32's resolution around 1.
    log_ratio = torch.tensor(1e-4)
    for estimator in (official_kl, uncapped):
        assert float(estimator(log_ratio)) == pytest.approx(5e-9, rel=0.01)
