"""Decoupled PPO: by hand, against autograd of a slow reference, and its limits."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import pytest
import torch
from hypothesis import given, settings

from precision.objectives.clipped import Clipped, Decoupled
from precision.objectives.objective import ScoredStep
from tests.support.examples import examples
from tests.support.objectives import run, scored_step, scored_steps

OverCap = Literal["mask", "truncate"]
OVER_CAP: tuple[OverCap, ...] = ("mask", "truncate")

# b = pi_prox / pi_b and r = pi / pi_prox of five tokens, clip .2, cap 2
ENGINE_RATIOS = [1.5, 0.5, 4.0, 1.0, 1.0]
RATIOS = [1.1, 1.5, 1.0, 0.5, 1.5]
ADVANTAGES = [2.0, 1.0, 1.0, -1.0, -1.0]
# b min(r A, clip(r) A): 1.5 * 2.2; .5 * 1.2 (clipped above); 4 is over the cap: 0, or 2 * 1; -.8 (clipped below); -1.5
TERMS = {"mask": [3.3, 0.6, 0.0, -0.8, -1.5], "truncate": [3.3, 0.6, 2.0, -0.8, -1.5]}
SLOPES = {"mask": [3.3, 0.0, 0.0, 0.0, -1.5], "truncate": [3.3, 0.0, 2.0, 0.0, -1.5]}
WEIGHT = {"mask": 4.0 / 5, "truncate": 6.0 / 5}


@pytest.mark.parametrize("over_cap", OVER_CAP)
def test_by_hand(over_cap: OverCap) -> None:
    step = scored_step(
        [[math.log(b * r)] for b, r in zip(ENGINE_RATIOS, RATIOS, strict=True)],
        ADVANTAGES,
        old=[[math.log(b)] for b in ENGINE_RATIOS],
    )
    outcome = run(Decoupled(mismatch_cap=2.0, over_cap=over_cap), step)
    # The dropped token stays in the denominator: N = 5.
    assert outcome.loss == pytest.approx(-sum(TERMS[over_cap]) / 5, rel=1e-12)
    assert outcome.gradient.tolist() == pytest.approx([-x / 5 for x in SLOPES[over_cap]], rel=1e-12)
    assert outcome.prepared.measured == pytest.approx({"cap_hits": 1 / 5, "weight": WEIGHT[over_cap]})
    assert (outcome.sums["clip_hits_high"], outcome.sums["clip_hits_low"]) == (1, 1)


@pytest.mark.parametrize("over_cap", OVER_CAP)
@settings(max_examples=examples(40))
@given(step=scored_steps())
def test_gradient_matches_a_slow_reference(over_cap: OverCap, step: ScoredStep) -> None:
    leaf = step.logprobs.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for t in torch.nonzero(step.sampled).flatten().tolist():
        behavior = math.exp(step.old_logprobs[t] - step.rollout_logprobs[t])
        weight = behavior if behavior <= 1.5 else {"mask": 0.0, "truncate": 1.5}[over_cap]
        ratio, advantage = (leaf[t] - step.old_logprobs[t]).exp(), step.advantages[t]
        total = total - weight * torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.3) * advantage)
    (total / step.sampled.sum()).backward()  # type: ignore[no-untyped-call]
    objective = Decoupled(clip_low=0.1, clip_high=0.3, mismatch_cap=1.5, over_cap=over_cap)
    torch.testing.assert_close(run(objective, step).gradient, leaf.grad, rtol=1e-9, atol=1e-12)


@settings(max_examples=examples(20))
@given(step=scored_steps())
def test_limits(step: ScoredStep) -> None:
    """A rollout that is the old policy: PPO. No stale weights: importance sampling. No clip and no cap: the whole
    ratio, wherever the old policy stands between the two."""
    own_engine = dataclasses.replace(step, rollout_logprobs=step.old_logprobs)
    ppo = run(Clipped(), own_engine)
    torch.testing.assert_close(run(Decoupled(), own_engine).gradient, ppo.gradient, rtol=1e-9, atol=1e-12)

    free = Clipped(clip_low=1.0, clip_high=1e30)
    first = dataclasses.replace(step, old_logprobs=step.logprobs)
    importance = run(free, step).gradient
    huge = 1e30
    torch.testing.assert_close(run(Decoupled(mismatch_cap=huge), first).gradient, importance, rtol=1e-9, atol=1e-12)
    unclipped = Decoupled(clip_low=1.0, clip_high=1e30, mismatch_cap=huge)
    torch.testing.assert_close(run(unclipped, step).gradient, importance, rtol=1e-9, atol=1e-12)


def test_an_overflowing_weight_is_dropped_or_cut_not_nan() -> None:
    step = scored_step([[80.0]], [-1.0], old=[[800.0]])
    assert Decoupled(over_cap="mask").prepare(step).advantages.tolist() == [0.0]
    assert Decoupled(over_cap="truncate").prepare(step).advantages.tolist() == [-5.0]
