"""TOPR: by hand, against autograd of a slow reference, and its limits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from precision.objectives.cispo import CISPO
from precision.objectives.objective import ScoredStep
from precision.objectives.topr import TOPR
from tests.support.examples import examples
from tests.support.objectives import ROLLOUT, run, scored_step, scored_steps


def test_by_hand() -> None:
    # Whole responses: A = 1 weighs 1 whatever its ratio (e^2). A = -2, ratio e^-.5: e^-.5. A = -1, ratio e^.3: capped
    # at 1. A = 0 counts as a success. N = 6.
    step = scored_step([[1.0, 1.0], [-0.7, 0.2], [0.3], [5.0]], [1.0, -2.0, -1.0, 0.0])
    outcome = run(TOPR(), step)
    weighed = [1, 1, -2 * math.exp(-0.5), -2 * math.exp(-0.5), -1, 0]
    assert outcome.gradient.tolist() == pytest.approx([-x / 6 for x in weighed], rel=1e-12)
    logprobs = [ROLLOUT + x for x in (1.0, 1.0, -0.7, 0.2, 0.3, 5.0)]
    assert outcome.loss == pytest.approx(-sum(w * x for w, x in zip(weighed, logprobs, strict=True)) / 6, rel=1e-12)
    assert outcome.prepared.measured == pytest.approx({"cap_hits": 1 / 6, "weight": (4 + 2 * math.exp(-0.5)) / 6})


def slow_gradient(step: ScoredStep, low: float, high: float) -> Tensor:
    """-1/N sum over responses of A sg(w) log pi(y), by autograd, response by response."""
    leaf = step.logprobs.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(step.offsets) - 1):
        tokens = torch.nonzero((step.row == row) & step.sampled).flatten()
        if len(tokens):
            advantage = step.advantages[tokens[0]]
            ratio = (leaf[tokens].detach() - step.rollout_logprobs[tokens]).exp().prod()
            weight = ratio.clamp(low, high) if advantage < 0 else 1.0
            total = total - advantage * weight * leaf[tokens].sum()
    (total / step.sampled.sum()).backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.5, 2.0), (1.0, 1.0)])
@settings(max_examples=examples(40))
@given(step=scored_steps())
def test_gradient_matches_a_slow_reference(low: float, high: float, step: ScoredStep) -> None:
    gradient = run(TOPR(clip_low=low, clip_high=high), step).gradient
    torch.testing.assert_close(gradient, slow_gradient(step, low, high), rtol=1e-9, atol=1e-15)


def test_long_responses_are_weighed_in_logs() -> None:
    # Products e^-10000 and e^10000: the one vanishes, the other is capped; neither is NaN.
    outcome = run(TOPR(), scored_step([[-5.0] * 2000, [5.0] * 2000], [-1.0, -1.0]))
    assert outcome.gradient[:2000].eq(0).all()
    assert outcome.gradient[2000:].eq(1 / 4000).all()


def test_failures_of_one_token_weigh_as_cispo_with_cap_one() -> None:
    step = scored_step([[-0.5], [0.4], [-3.0]], [-1.0, -2.0, -0.5])
    torch.testing.assert_close(run(TOPR(), step).gradient, run(CISPO(cap=1.0), step).gradient)
