"""P3O: gradients against finite differences and exact enumeration, scopes, refusals (goldens: tests/golden)."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from precision.ess import ess_from_sums
from precision.objectives import P3O, StepContext, TokenBatch

Estimator = Literal["official", "importance"]
ESTIMATORS: tuple[Estimator, ...] = ("official", "importance")
each_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)


def run(
    objective: P3O, log_ratios: list[float], advantages: list[float], context: StepContext
) -> tuple[float, list[float], dict[str, Tensor]]:
    sampler = torch.full((1, len(log_ratios)), -1.5, dtype=torch.float64)
    logprobs = (sampler + torch.tensor([log_ratios], dtype=torch.float64)).requires_grad_()
    batch = TokenBatch(
        sampler_logprobs=sampler,
        advantages=torch.tensor([advantages], dtype=torch.float64),
        mask=torch.ones_like(sampler, dtype=torch.bool),
    )
    loss, sums = objective(logprobs, batch, context)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.tolist()[0], sums


def test_by_hand() -> None:
    # e = .5, N = 4, log pi = -1.5 + l.
    # Token 1: l = 0, rho 1, so weight .5, A = 2. Token 2: l = ln 1/4, weight .25, A = -1.
    # K: token 1: 0, slope 0; token 2: -ln 4 + 4 - 1 = 3 - ln 4, slope 1 - 4 = -3.
    # loss = [ -.5 * 2 * -1.5 - .25 * -1 * (-1.5 - ln 4) + .5 (3 - ln 4) ] / 4
    # slopes: -.5 * 2 / 4;  (.25 + .5 * -3) / 4
    loss, gradient, sums = run(P3O(), [0.0, -math.log(4)], [2.0, -1.0], StepContext(num_tokens=4, step_ess=0.5))
    kl = 3 - math.log(4)
    assert loss == pytest.approx((1.5 - 0.25 * (1.5 + math.log(4)) + 0.5 * kl) / 4, rel=1e-12)
    assert gradient == pytest.approx([-0.25, -1.25 / 4], rel=1e-12)
    assert float(sums["kl"]) == pytest.approx(kl, rel=1e-12)
    assert float(sums["kl_loss"]) == pytest.approx(kl / 2, rel=1e-12)
    assert (sums["cap_hits"], float(sums["weight"]), sums["objective_ess"]) == (1, pytest.approx(0.75), 1.0)


def test_cap_hits_are_the_ratios_above_the_ess() -> None:
    _, _, sums = run(P3O(), [0.0, 0.1, 5.0, -3.0], [1.0] * 4, StepContext(num_tokens=4, step_ess=0.5))
    assert sums["cap_hits"] == 3
    assert float(sums["weight"]) == pytest.approx(1.5 + math.exp(-3), rel=1e-12)


def test_importance_by_hand() -> None:
    # e = .5, A = 0. l = ln 1/4: K = -ln 4 / 4 - 1/4 + 1, slope .25 * -ln 4.
    # l = ln 2: K = 2 ln 2 - 1, slope .5 ln 2 (capped, 2 ln 2 without).
    log_ratios = [-math.log(4), math.log(2)]
    loss, gradient, sums = run(
        P3O(kl_estimator="importance"), log_ratios, [0.0, 0.0], StepContext(num_tokens=2, step_ess=0.5)
    )
    kl = (0.75 - math.log(4) / 4) + (2 * math.log(2) - 1)
    assert float(sums["kl"]) == pytest.approx(kl, rel=1e-12)
    assert loss == pytest.approx(0.5 * kl / 2, rel=1e-12)
    assert gradient == pytest.approx([-0.25 * 0.25 * math.log(4), 0.25 * 0.5 * math.log(2)], rel=1e-12)


@each_estimator
def test_exactly_on_policy_is_the_score_function_gradient(estimator: Estimator) -> None:
    advantages = [1.0, -2.0, 0.5]
    for scope, tolerance in (("step", 1e-15), ("micro_batch", 1e-8)):  # 1e-8: the epsilon inside the ESS
        objective = P3O(ess_scope=scope, kl_estimator=estimator)  # type: ignore[arg-type]
        _, gradient, sums = run(objective, [0.0] * 3, advantages, StepContext(num_tokens=3, step_ess=1.0))
        assert gradient == pytest.approx([-a / 3 for a in advantages], rel=tolerance)
        assert sums["kl"] == 0


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(-8, 8), st.floats(-3, 3)), min_size=1, max_size=12),
    st.floats(0.05, 1.0),
)
def test_official_gradient_matches_finite_differences(tokens: list[tuple[float, float]], ess: float) -> None:
    """Inside the clip, of -w A log pi + (1 - e)(l + e^-l - 1) with w and e held still, in slow float64."""
    log_ratios, advantages = [list(column) for column in zip(*tokens, strict=True)]
    _, gradient, _ = run(P3O(), log_ratios, advantages, StepContext(num_tokens=len(tokens), step_ess=ess))
    step = 1e-5
    for (log_ratio, advantage), slope in zip(tokens, gradient, strict=True):
        weight = min(math.exp(log_ratio), ess)

        def term(l: float, weight: float = weight, advantage: float = advantage) -> float:  # noqa: E741
            return -weight * advantage * l + (1 - ess) * (l + math.exp(-l) - 1)

        difference = (term(log_ratio + step) - term(log_ratio - step)) / (2 * step) / len(tokens)
        assert slope == pytest.approx(difference, rel=1e-5, abs=1e-6)


def test_a_vanishing_token_is_pulled_back_not_pushed_down() -> None:
    # At l = -12 autograd of the clipped form gives +1 (descent lowers log pi further); the safe slope is 1 - e^10.
    _, gradient, _ = run(P3O(), [-12.0], [0.0], StepContext(num_tokens=1, step_ess=0.5))
    assert gradient[0] == pytest.approx(0.5 * (1 - math.exp(10)), rel=1e-12)


@settings(deadline=None)
@given(st.lists(st.floats(-6, 6), min_size=1, max_size=20))
def test_micro_batch_scope_is_step_scope_with_its_own_ess(log_ratios: list[float]) -> None:
    advantages = [math.cos(i) for i in range(len(log_ratios))]
    ratios = [math.exp(l) for l in log_ratios]  # noqa: E741
    ess = ess_from_sums(sum(ratios), sum(r * r for r in ratios), len(ratios))
    own = run(P3O(ess_scope="micro_batch"), log_ratios, advantages, StepContext(num_tokens=50))
    given_ess = run(P3O(), log_ratios, advantages, StepContext(num_tokens=50, step_ess=ess))
    assert own[0] == pytest.approx(given_ess[0], rel=1e-9, abs=1e-12)
    assert own[1] == pytest.approx(given_ess[1], rel=1e-9, abs=1e-12)
    assert float(own[2]["objective_ess"]) == pytest.approx(ess * len(ratios), rel=1e-9)


def test_micro_batch_scope_sums_over_ranks() -> None:
    # The other rank holds one ratio of 3: S1 = 1 + 3, S2 = 1 + 9, N = 2: e = 16 / 20
    seen: list[Tensor] = []

    def other_rank(sums: Tensor) -> Tensor:
        seen.append(sums)
        return sums + torch.tensor([3.0, 9.0, 1.0], dtype=torch.float64)

    objective = P3O(ess_scope="micro_batch")
    _, _, sums = run(objective, [0.0], [1.0], StepContext(num_tokens=2, sum_over_ranks=other_rank))
    assert float(sums["objective_ess"]) == pytest.approx(0.8, rel=1e-8)
    assert seen[0].dtype is torch.float64
    assert (objective.needs_scoring, P3O().needs_step_ess) == (False, True)


def test_nan_from_another_rank_raises() -> None:
    context = StepContext(num_tokens=1, sum_over_ranks=lambda sums: sums * math.nan)
    with pytest.raises(FloatingPointError):
        run(P3O(ess_scope="micro_batch"), [0.0], [1.0], context)


def test_step_scope_needs_a_sound_ess() -> None:
    with pytest.raises(ValueError, match="needs StepContext"):
        run(P3O(), [0.0], [1.0], StepContext(num_tokens=1))
    for ess in (0.0, -1.0, 1.5, math.nan, math.inf):
        with pytest.raises(FloatingPointError, match="step_ess"):
            run(P3O(), [0.0], [1.0], StepContext(num_tokens=1, step_ess=ess))


def expectation_under_sampler(
    estimator: Estimator, logits: Tensor, sampler: Tensor, ess: float
) -> tuple[float, Tensor]:
    """Mean of K and of its gradient in the learner's logits, over all tokens weighed by the sampler's probability.

    With A = 0 the gradient of the loss is (1 - e) times that of K; one token a call, so the weight is exact.
    """
    value, gradient = 0.0, torch.zeros_like(logits)
    for token in range(len(logits)):
        leaf = logits.clone().requires_grad_()
        batch = TokenBatch(
            sampler_logprobs=sampler.log()[token].reshape(1, 1),
            advantages=torch.zeros(1, 1, dtype=torch.float64),
            mask=torch.ones(1, 1, dtype=torch.bool),
        )
        loss, sums = P3O(kl_estimator=estimator)(
            leaf.log_softmax(0)[token].reshape(1, 1), batch, StepContext(num_tokens=1, step_ess=ess)
        )
        loss.backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        value += float(sampler[token] * sums["kl"])
        gradient += sampler[token] * leaf.grad / (1 - ess)
    return value, gradient


def exact(logits: Tensor, sampler: Tensor, divergence: str) -> tuple[float, Tensor]:
    leaf = logits.clone().requires_grad_()
    learner = leaf.softmax(0)
    reverse = (learner * (learner / sampler).log()).sum()
    forward = (sampler * (sampler / learner).log()).sum()
    chi2 = (sampler**2 / learner).sum() - 1
    value = {"KL(learner||sampler)": reverse, "chi2-KL(sampler||learner)": chi2 - forward}[divergence]
    value.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return value.item(), leaf.grad


SAMPLER = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05], dtype=torch.float64)
SHIFT = torch.tensor([-0.9, 0.4, 1.1, -0.2, 0.6], dtype=torch.float64)


def test_official_kl_from_sampler_samples_estimates_another_divergence() -> None:
    """Under pi_b its mean and gradient are those of chi^2(pi_b || pi) - KL(pi_b || pi), not of KL(pi || pi_b)."""
    logits = SAMPLER.log() + SHIFT
    value, gradient = expectation_under_sampler("official", logits, SAMPLER, 0.5)
    other_value, other_gradient = exact(logits, SAMPLER, "chi2-KL(sampler||learner)")
    wanted, _ = exact(logits, SAMPLER, "KL(learner||sampler)")
    assert value == pytest.approx(other_value, rel=1e-12)
    torch.testing.assert_close(gradient, other_gradient, rtol=1e-12, atol=1e-14)
    assert abs(value - wanted) > 0.3 * wanted  # the bias is not small


def test_importance_kl_is_unbiased_in_value() -> None:
    logits = SAMPLER.log() + SHIFT
    value, _ = expectation_under_sampler("importance", logits, SAMPLER, 0.5)
    assert value == pytest.approx(exact(logits, SAMPLER, "KL(learner||sampler)")[0], rel=1e-12)


@each_estimator
def test_gradient_bias_vanishes_with_the_mismatch(estimator: Estimator) -> None:
    """The cap of `importance` (e near 1 here) and the wrong sampling law of `official` both cost first order only."""
    biases = []
    for size in (0.1, 0.01, 0.001):
        logits = SAMPLER.log() + size * SHIFT
        _, gradient = expectation_under_sampler(estimator, logits, SAMPLER, 1 - 1e-9)
        _, wanted = exact(logits, SAMPLER, "KL(learner||sampler)")
        biases.append(float((gradient - wanted).norm() / wanted.norm()))
    assert biases[0] < 0.3
    assert biases[1] == pytest.approx(biases[0] / 10, rel=0.2)
    assert biases[2] == pytest.approx(biases[1] / 10, rel=0.2)


def test_capped_importance_gradient_is_smaller_than_the_exact_one_but_points_alike() -> None:
    logits = SAMPLER.log() + SHIFT
    _, gradient = expectation_under_sampler("importance", logits, SAMPLER, 0.5)
    _, wanted = exact(logits, SAMPLER, "KL(learner||sampler)")
    assert gradient.norm() < wanted.norm()
    assert torch.cosine_similarity(gradient, wanted, dim=0) > 0.8
