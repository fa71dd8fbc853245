"""P4O: the mixture and the two ESS by hand, its gradient against autograd, and its limit P3O."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from precision.objectives.objective import ScoredStep
from precision.objectives.p3o import P3O, P4O
from tests.support.examples import examples
from tests.support.objectives import ROLLOUT, run, scored_step, scored_steps

LN3 = math.log(3.0)


def test_by_hand() -> None:
    # Two tokens. pi / pi_b = 3 and 1: e_b = 16 / (2 * 10) = .8. pi / pi_prox = 1 and 2: e_prox = 9 / (2 * 5) = .9.
    # So e = .8, weights .2 and .1: pi_mix = 2/3 pi_b + 1/3 pi_prox.
    # Token 1: pi_prox = 3 pi_b: pi_mix = 5/3 pi_b, pi / pi_mix = 9/5. Token 2: pi_prox = pi_b / 2: 5/6 pi_b, 6/5.
    step = scored_step([[LN3], [0.0]], [2.0, -1.0], old=[[LN3], [-math.log(2.0)]])
    outcome = run(P4O(), step)
    prepared = outcome.prepared
    assert prepared.step_ess == pytest.approx(0.8, rel=1e-8)
    assert prepared.measured == pytest.approx({"rollout_ess": 0.8, "old_ess": 0.9}, rel=1e-8)
    assert prepared.anchor_logprobs is not None
    assert prepared.anchor_logprobs.tolist() == pytest.approx([ROLLOUT + math.log(5 / 3), ROLLOUT + math.log(5 / 6)])
    # K = l + e^-l - 1, slope 1 - e^-l: log 1.8 + 5/9 - 1 and 4/9; log 1.2 + 5/6 - 1 and 1/6. Both rho exceed e.
    kl = math.log(1.8) - 4 / 9 + math.log(1.2) - 1 / 6
    assert outcome.sums["kl"] == pytest.approx(kl, rel=1e-7)
    assert outcome.sums["cap_hits"] == 2
    policy = -0.8 * 2 * (ROLLOUT + LN3) + 0.8 * ROLLOUT
    assert outcome.loss == pytest.approx((policy + 0.2 * kl) / 2, rel=1e-7)
    assert outcome.gradient.tolist() == pytest.approx([(-1.6 + 0.2 * 4 / 9) / 2, (0.8 + 0.2 / 6) / 2], rel=1e-7)


def test_the_smaller_ess_caps_whichever_anchor_it_belongs_to() -> None:
    # As above with the two anchors exchanged: pi / pi_b = 1 and 2, pi / pi_prox = 3 and 1.
    step = scored_step([[0.0], [math.log(2.0)]], [1.0, 1.0], old=[[-LN3], [math.log(2.0)]])
    prepared = P4O().prepare(step)
    assert prepared.measured == pytest.approx({"rollout_ess": 0.9, "old_ess": 0.8}, rel=1e-8)
    assert prepared.step_ess == pytest.approx(0.8, rel=1e-8)


@settings(max_examples=examples(60))
@given(step=scored_steps())
def test_on_the_first_step_of_a_stage_it_is_p3o(step: ScoredStep) -> None:
    step = dataclasses.replace(step, old_logprobs=step.logprobs)
    p4o, p3o = run(P4O(), step), run(P3O(), step)
    assert p4o.prepared.measured["old_ess"] == pytest.approx(1.0, abs=1e-6)
    # Not exactly: the epsilon inside the ESS leaves w_prox at about 1e-8.
    torch.testing.assert_close(p4o.gradient, p3o.gradient, rtol=1e-3, atol=1e-5)


@settings(max_examples=examples(60))
@given(step=scored_steps())
def test_gradient_against_autograd_of_the_formula(step: ScoredStep) -> None:
    outcome = run(P4O(), step)
    logb, logprox = step.rollout_logprobs[step.sampled], step.old_logprobs[step.sampled]
    advantages = step.advantages[step.sampled]
    leaf = step.logprobs[step.sampled].clone().requires_grad_()

    def ess(anchor: Tensor) -> float:
        ratios = (leaf.detach() - anchor).exp()
        value = float(ratios.sum() ** 2 / (len(ratios) * (ratios.square().sum() + 1e-8)))
        return max(value, 1 / len(ratios))

    behind, near = ess(logb), ess(logprox)
    weights = torch.tensor([1 - behind, 1 - near], dtype=torch.float64) + 1e-30
    mixture = (weights[0] * logb.exp() + weights[1] * logprox.exp()) / weights.sum()
    e = min(behind, near)
    weight = (leaf.detach() - logb).exp().clamp(max=e)
    log_ratios = leaf - mixture.log()
    # Outside the clip of the exponent autograd has the wrong slope; see test_kl_estimators.
    if bool((log_ratios.abs() > 9.9).any()):
        return
    kl = log_ratios + (-log_ratios).exp() - 1
    loss = (-weight * advantages * leaf + (1 - e) * kl).sum() / len(leaf)
    loss.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    torch.testing.assert_close(outcome.gradient[step.sampled], leaf.grad, rtol=1e-7, atol=1e-10)
    assert outcome.prepared.step_ess == pytest.approx(e, rel=1e-9)
