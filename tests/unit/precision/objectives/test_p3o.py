"""P3O: by hand, gradients against slow references, scopes and units of the ESS, refusals (goldens: tests/golden)."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from precision.objectives.objective import ScoredStep, StepContext, TokenBatch
from precision.objectives.p3o import P3O
from precision.ratios import ess_from_sums
from tests.support import objectives
from tests.support.examples import examples
from tests.support.objectives import scored_step, scored_steps

Estimator = Literal["official", "importance"]
Unit = Literal["token", "sequence"]
ESTIMATORS: tuple[Estimator, ...] = ("official", "importance")
each_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)
each_unit = pytest.mark.parametrize("unit", ["token", "sequence"])


def run(
    objective: P3O, log_ratios: list[float], advantages: list[float], context: StepContext
) -> tuple[float, list[float], dict[str, Tensor]]:
    rollout = torch.full((1, len(log_ratios)), -1.5, dtype=torch.float64)
    logprobs = (rollout + torch.tensor([log_ratios], dtype=torch.float64)).requires_grad_()
    batch = TokenBatch(
        rollout_logprobs=rollout,
        advantages=torch.tensor([advantages], dtype=torch.float64),
        mask=torch.ones_like(rollout, dtype=torch.bool),
    )
    loss, sums = objective.loss(logprobs, batch, context)
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
    assert (objective.facts.needs_scoring, P3O().facts.needs_scoring) == (False, True)


def test_nan_from_another_rank_raises() -> None:
    context = StepContext(num_tokens=1, sum_over_ranks=lambda sums: sums * math.nan)
    with pytest.raises(FloatingPointError):
        run(P3O(ess_scope="micro_batch"), [0.0], [1.0], context)


def test_step_scope_needs_a_sound_ess() -> None:
    with pytest.raises(ValueError, match="this objective needs"):
        run(P3O(), [0.0], [1.0], StepContext(num_tokens=1))
    for ess in (0.0, -1.0, 1.5, math.nan, math.inf):
        with pytest.raises(FloatingPointError, match="step_ess"):
            run(P3O(), [0.0], [1.0], StepContext(num_tokens=1, step_ess=ess))


@each_estimator
@each_unit
@settings(max_examples=examples(40))
@given(step=scored_steps())
def test_gradient_against_autograd_of_a_slow_reference(estimator: Estimator, unit: Unit, step: ScoredStep) -> None:
    """The whole way from the scored step, token by token, in float64."""
    outcome = objectives.run(P3O(kl_estimator=estimator, ess_unit=unit), step)
    ess = outcome.prepared.step_ess
    assert ess is not None
    leaf = step.logprobs.clone().requires_grad_()
    num_tokens = int(step.sampled.sum())
    loss = torch.zeros((), dtype=torch.float64)
    for t in torch.nonzero(step.sampled).flatten().tolist():
        log_ratio = leaf[t] - step.rollout_logprobs[t]
        held = log_ratio.detach()
        if abs(float(held)) > 9.9:  # outside the clip of the exponent, where autograd has the wrong slope
            return
        weight = min(math.exp(float(held)), ess)
        # The slope of rho l - rho + 1 is rho l; with its weight capped it is that of sg(min(rho, e) l) l.
        kl = log_ratio + torch.exp(-log_ratio) - 1 if estimator == "official" else weight * held * log_ratio
        loss = loss + (-weight * step.advantages[t] * leaf[t] + (1 - ess) * kl) / num_tokens
    loss.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    torch.testing.assert_close(outcome.gradient, leaf.grad, rtol=1e-9, atol=1e-12)


def test_prepare_by_hand() -> None:
    # Token ratios 3, 1, 1/3: S1 = 13/3, S2 = 91/9, N = 3: (169/9) / (91/3) = 169/273.
    # Response ratios 3 and 1/3: S1 = 10/3, S2 = 82/9, 2 responses: (100/9) / (164/9) = 25/41.
    step = scored_step([[math.log(3), 0.0], [-math.log(3)]], [1.0, 1.0])
    prepared = P3O().prepare(step)
    assert prepared.step_ess == pytest.approx(169 / 273, rel=1e-8)
    assert torch.equal(prepared.advantages, step.advantages)
    assert P3O(ess_unit="sequence").prepare(step).step_ess == pytest.approx(25 / 41, rel=1e-12)


def test_sequence_ess_of_long_responses_is_taken_in_logs() -> None:
    # Ratios e^5000 and e^4999: with x = e^-1 the ESS is (1 + x)^2 / (2 (1 + x^2)).
    step = scored_step([[5.0] * 1000, [5.0] * 999 + [4.0]], [1.0, 1.0])
    x = math.exp(-1)
    assert P3O(ess_unit="sequence").prepare(step).step_ess == pytest.approx((1 + x) ** 2 / (2 + 2 * x * x), rel=1e-9)


@pytest.mark.parametrize("length", [1, 4, 25])
def test_sequence_ess_falls_with_length_as_the_lognormal_law_says(length: int) -> None:
    # Log-ratios of a response of n tokens with spread s add up to spread s sqrt(n): exp(-s^2 n) with s = .1.
    generator = torch.Generator().manual_seed(11)
    noise = 0.1 * torch.randn(4000, length, generator=generator, dtype=torch.float64)
    step = scored_step(noise.tolist(), [1.0] * 4000)
    assert P3O(ess_unit="sequence").prepare(step).step_ess == pytest.approx(math.exp(-0.01 * length), abs=0.03)
    assert P3O().prepare(step).step_ess == pytest.approx(math.exp(-0.01), abs=0.01)


def test_sequence_ess_refuses_micro_batch_scope() -> None:
    with pytest.raises(ValueError, match="needs ess_scope step"):
        P3O(ess_unit="sequence", ess_scope="micro_batch")


@each_estimator
def test_the_anchor_is_the_estimator_that_was_chosen(estimator: Estimator) -> None:
    # e = .5, A = 0, one token with l = ln 2. official: ln 2 - 1/2; importance: 2 ln 2 - 1.
    kl = math.log(2) - 0.5 if estimator == "official" else 2 * math.log(2) - 1
    objective = P3O(kl_estimator=estimator)
    loss, _, sums = run(objective, [math.log(2)], [0.0], StepContext(num_tokens=1, step_ess=0.5))
    assert (loss, float(sums["policy_loss"])) == (pytest.approx(0.5 * kl, rel=1e-12), 0.0)


def test_the_cap_alone_has_no_anchor() -> None:
    # e = .5: rho 2 and 1 are both capped, whatever l is.
    context = StepContext(num_tokens=2, step_ess=0.5)
    loss, gradient, sums = run(P3O(kl_estimator="none"), [math.log(2.0), 0.0], [1.0, -1.0], context)
    assert gradient == pytest.approx([-0.25, 0.25])
    assert float(sums["kl_loss"]) == 0.0
    assert loss == pytest.approx(-0.25 * math.log(2.0))
