"""DPPO-TV: by hand, against autograd of a slow reference, and its limits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precision.objectives.clipped import Clipped
from precision.objectives.dppo_tv import DPPOTV
from precision.objectives.objective import ScoredStep, StepContext, TokenBatch
from tests.support.examples import examples
from tests.support.objectives import run, scored_steps


def test_by_hand() -> None:
    # pi_b, pi, A. Threshold .2, coefficient .1, N = 5.
    # .5 -> .8, A = 2: risen by .3, masked. .01 -> .05, A = 1: rho 5 but only .04: kept, 5 * 1.
    # .5 -> .2, A = -1: fallen by .3, masked. .5 -> .8, A = -1: it rises against A: kept, -1.6.
    # .9 -> .6, A = 1: kept, 2/3.
    rollout = [0.5, 0.01, 0.5, 0.5, 0.9]
    learner = [0.8, 0.05, 0.2, 0.8, 0.6]
    advantages = [2.0, 1.0, -1.0, -1.0, 1.0]
    kept = [0, 1, 0, 1, 1]
    logprobs = torch.tensor([learner], dtype=torch.float64).log().requires_grad_()
    batch = TokenBatch(
        rollout_logprobs=torch.tensor([rollout], dtype=torch.float64).log(),
        advantages=torch.tensor([advantages], dtype=torch.float64),
        mask=torch.ones(1, 5, dtype=torch.bool),
    )
    loss, sums = DPPOTV(threshold=0.2, square_coefficient=0.1).loss(logprobs, batch, StepContext(num_tokens=5))
    loss.backward()  # type: ignore[no-untyped-call]
    logs = [math.log(p / b) for p, b in zip(learner, rollout, strict=True)]
    squares = sum(x * x for x in logs)
    assert loss.item() == pytest.approx((-5 + 1.6 - 2 / 3 + 0.1 * squares) / 5, rel=1e-12)
    # slope: -rho A where kept, 2 * .1 * log rho everywhere
    slopes = [(-k * math.exp(x) * a + 0.2 * x) / 5 for k, x, a in zip(kept, logs, advantages, strict=True)]
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx(slopes, rel=1e-12)
    assert (sums["clip_hits"], sums["clip_hits_high"], sums["clip_hits_low"]) == (2, 1, 1)
    assert float(sums["square"]) == pytest.approx(squares, rel=1e-12)
    assert not DPPOTV().facts.needs_scoring


@settings(max_examples=examples(60))
@given(step=scored_steps(), threshold=st.floats(0.01, 1.0), coefficient=st.sampled_from([0.0, 1e-3, 0.5]))
def test_gradient_matches_a_slow_reference(step: ScoredStep, threshold: float, coefficient: float) -> None:
    leaf = step.logprobs.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for t in torch.nonzero(step.sampled).flatten().tolist():
        log_ratio, advantage = leaf[t] - step.rollout_logprobs[t], float(step.advantages[t])
        change = math.exp(leaf[t].item()) - math.exp(float(step.rollout_logprobs[t]))
        if not (change > threshold if advantage > 0 else change < -threshold):
            total = total - log_ratio.exp() * advantage
        total = total + coefficient * log_ratio**2
    (total / step.sampled.sum()).backward()  # type: ignore[no-untyped-call]
    gradient = run(DPPOTV(threshold=threshold, square_coefficient=coefficient), step).gradient
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-9, atol=1e-12)


@settings(max_examples=examples(20))
@given(step=scored_steps())
def test_with_a_threshold_of_one_and_no_square_it_is_importance_sampling(step: ScoredStep) -> None:
    # The strategy's learner may "exceed" probability 1; a real one cannot, so its change never exceeds 1.
    proper = step.logprobs.clamp(max=0.0)
    step = ScoredStep(**{**vars(step), "logprobs": proper})
    gradient = run(DPPOTV(threshold=1.0, square_coefficient=0.0), step).gradient
    expected = run(Clipped(clip_low=1.0, clip_high=1e30), step).gradient
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)
