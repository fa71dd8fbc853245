"""M2PO: bounds and masks by hand, the gradient of the clip against autograd, invariances."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precision.objectives.m2po import M2PO, widest_cap, widest_kept
from precision.objectives.objective import ScoredStep
from tests.support.examples import examples
from tests.support.objectives import run, scored_step, scored_steps

Variant = Literal["clip", "mask", "areal"]
VARIANTS: tuple[Variant, ...] = ("clip", "mask", "areal")
each = pytest.mark.parametrize("variant", VARIANTS)
magnitude_lists = st.lists(st.floats(0.0, 5.0), min_size=1, max_size=20)


def test_widest_cap_by_hand() -> None:
    # Squares .01, .04, .25 (sum .30, mean .1). Capped at .1: mean .01. At .2: (.01 + .04 + .04) / 3 = .03. At .5: .1.
    magnitudes = torch.tensor([0.5, 0.1, 0.2], dtype=torch.float64)
    assert widest_cap(magnitudes, 0.04) == 0.2
    assert widest_cap(magnitudes, 0.029) == 0.1
    assert widest_cap(magnitudes, 0.009) == 0.0
    assert widest_cap(magnitudes, 0.1001) == math.inf
    assert widest_cap(magnitudes[:0], 0.04) == math.inf


def test_widest_kept_by_hand() -> None:
    # Means of the squares up to .1, .2, .5: .01, .025, .1.
    magnitudes = torch.tensor([0.5, 0.1, 0.2], dtype=torch.float64)
    assert widest_kept(magnitudes, 0.04) == 0.2
    assert widest_kept(magnitudes, 0.024) == 0.1
    assert widest_kept(magnitudes, 0.1001) == 0.5
    assert widest_kept(magnitudes, 0.009) == -1.0
    # Keeping one .3 of two would do (.045 on average), keeping both (.06) would not: equal ones go together.
    assert widest_kept(torch.tensor([0.3, 0.0, 0.3], dtype=torch.float64), 0.05) == 0.0


@given(magnitude_lists, st.floats(1e-3, 4.0))
def test_the_widest_bound_is_within_the_threshold_and_the_next_is_not(values: list[float], threshold: float) -> None:
    """Against the definition, tried out on every candidate."""
    magnitudes = torch.tensor(values, dtype=torch.float64)

    def capped(bound: float) -> float:
        return sum(min(x, bound) ** 2 for x in values) / len(values)

    def kept(bound: float) -> float:
        stay = [x * x for x in values if x <= bound]
        return sum(stay) / len(stay)

    slack = 1e-12
    allowed = [x for x in values if capped(x) <= threshold + slack]
    refused = [x for x in values if capped(x) > threshold - slack]
    found = widest_cap(magnitudes, threshold)
    assert found in (math.inf, 0.0) or found in allowed
    assert all(x >= min(found, max(values)) for x in refused)
    kept_bound = widest_kept(magnitudes, threshold)
    assert kept_bound == -1.0 or kept(kept_bound) <= threshold + slack
    assert all(kept(x) > threshold - slack for x in values if x > kept_bound)


# Harmful: A = 1 with l = .1, .2, 1; A = -1 with l = -.5. Harmless: A = 1 with l = -2; A = -1 with l = 2.
STEP = ([[0.1, 0.2, 1.0, -2.0], [-0.5, 2.0]], [1.0, -1.0])


def test_mask_by_hand() -> None:
    # Squares of the harmful .01, .04, .25, 1: mean .325. Up to .2: .025; up to .5: .1. So threshold .11 drops 1.
    outcome = run(M2PO(variant="mask", threshold=0.11), scored_step(*STEP))
    expected = [-math.exp(0.1), -math.exp(0.2), 0.0, -math.exp(-2.0), math.exp(-0.5), math.exp(2.0)]
    assert outcome.gradient.tolist() == pytest.approx([slope / 6 for slope in expected], rel=1e-12)
    assert outcome.prepared.measured == pytest.approx(
        {"second_moment": 0.325, "clip_hits": 1 / 6, "clip_hits_high": 1 / 6, "clip_hits_low": 0.0}
    )
    assert outcome.sums["weight"] == pytest.approx(sum(math.exp(x) for x in (0.1, 0.2, 1.0, -2.0, -0.5, 2.0)))


def test_clip_by_hand() -> None:
    # Capped at .2: (.01 + 3 * .04) / 4 = .0325; at .5: (.01 + .04 + 2 * .25) / 4 = .1375. Threshold .1: tau = .2, which
    # would drop .5 and 1; the floor log 1.5 = .405 above and log .7 = -.357 below changes nothing for them.
    step = scored_step(*STEP)
    prepared = M2PO(threshold=0.1).prepare(step)
    assert prepared.advantages.tolist() == [1.0, 1.0, 0.0, 1.0, 0.0, -1.0]
    assert prepared.measured["clip_hits_low"] == pytest.approx(1 / 6)
    # Capped at .1 the mean is .01, so threshold .02 has tau = .1: without floors .2 goes too, with them it stays.
    assert M2PO(threshold=0.02).prepare(step).advantages.tolist() == [1.0, 1.0, 0.0, 1.0, 0.0, -1.0]
    bare = M2PO(threshold=0.02, clip_low=0.0, clip_high=0.0)
    assert bare.prepare(step).advantages.tolist() == [1.0, 0.0, 0.0, 1.0, 0.0, -1.0]
    # Within the threshold as it is: nothing is clipped, floors or not.
    assert M2PO(threshold=0.33).prepare(step).advantages.tolist() == [1.0, 1.0, 1.0, 1.0, -1.0, -1.0]


def test_areal_by_hand() -> None:
    # All tokens, engine against pi_prox: squares .01, 4, 0, whatever A and pi are. Up to .1: .005. 2 goes.
    step = scored_step([[3.0, 0.5], [0.7]], [1.0, -1.0], old=[[0.1, 2.0], [0.0]])
    outcome = run(M2PO(variant="areal"), step)
    prepared = outcome.prepared
    assert prepared.advantages.tolist() == [1.0, 0.0, -1.0]
    # The weight is pi / pi_b = (pi_prox / pi_b)(pi / pi_prox).
    assert outcome.gradient.tolist() == pytest.approx([-math.exp(3.0) / 3, 0.0, math.exp(0.7) / 3], rel=1e-6)
    assert prepared.measured["second_moment"] == pytest.approx(4.01 / 3)
    assert prepared.measured["clip_hits_high"] == pytest.approx(1 / 3)


@settings(max_examples=examples(60))
@given(step=scored_steps(), threshold=st.sampled_from([1e-3, 0.04, 1.0]))
def test_clip_has_the_gradient_of_the_authors_clip(step: ScoredStep, threshold: float) -> None:
    """-1/N sum min(rho A, clip(rho, e^-tau, e^tau) A), floors included, by autograd in float64."""
    objective = M2PO(threshold=threshold)
    gradient = run(objective, step).gradient
    log_ratios = (step.logprobs - step.rollout_logprobs)[step.sampled]
    advantages = step.advantages[step.sampled]
    harmful = ((advantages > 0) & (log_ratios > 0)) | ((advantages < 0) & (log_ratios < 0))
    tau = widest_cap(log_ratios[harmful].abs(), threshold)
    # A hair wider than the bound: the token that sets it is on it, and rounding must not decide.
    floor, ceiling = min(math.exp(-tau) * (1 - 1e-9), 0.7), max(math.exp(min(tau, 80.0)) * (1 + 1e-9), 1.5)
    leaf = step.logprobs[step.sampled].clone().requires_grad_()
    ratios = (leaf - step.rollout_logprobs[step.sampled]).exp()
    loss = -torch.minimum(ratios * advantages, ratios.clamp(floor, ceiling) * advantages).sum() / len(leaf)
    loss.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    torch.testing.assert_close(gradient[step.sampled], leaf.grad, rtol=1e-5, atol=1e-7)


@each
def test_never_above_the_threshold_after_dropping(variant: Variant) -> None:
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(200, generator=generator, dtype=torch.float64).tolist()
    step = scored_step([[x] for x in noise], [math.copysign(1.0, math.sin(i)) for i in range(200)])
    prepared = M2PO(variant=variant, clip_low=0.0, clip_high=0.0).prepare(step)
    log_ratios = step.logprobs - step.rollout_logprobs
    kept = prepared.advantages != 0
    if variant != "areal":
        kept &= step.advantages * log_ratios > 0
    assert 0 < int(kept.sum()) < 200
    assert float(log_ratios[kept].square().mean()) <= 0.04
