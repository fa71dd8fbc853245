"""Mu-GRPO: the relaxed clip and every form of the veto by hand, and against a slow loop over tokens."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import pytest
import torch
from hypothesis import given, settings

from precision.objectives.clipped import Clipped
from precision.objectives.mu_grpo import MuGRPO
from precision.objectives.objective import ScoredStep
from tests.support.examples import examples
from tests.support.objectives import run, scored_step, scored_steps

Trigger = Literal["below", "above", "none"]
Scope = Literal["suffix", "token", "response"]

# Ratios of a failed response (A = -1) of six tokens, and of a succeeded one (A = 2) with the same ratios.
RATIOS = [1.0, 0.2, 2.0, 0.1, 6.0, 0.5]
LOGS = [math.log(r) for r in RATIOS]
STEP = scored_step([LOGS, LOGS], [-1.0, 2.0])
N = 12
# The succeeded response: min(2 rho, 2 clip(rho, 0, 5)) has slope 2 rho, but none at rho = 6; no veto ever touches it.
SUCCEEDED = [-2 * r / N for r in (1.0, 0.2, 2.0, 0.1, 0.0, 0.5)]


def failed(kept: list[int]) -> list[float]:
    """Slopes of the failed response: rho on what is kept, whatever the size of rho."""
    return [k * r / N for k, r in zip(kept, RATIOS, strict=True)]


@pytest.mark.parametrize(
    ("objective", "kept"),
    [
        # below .3: triggers are the ratios .2 and .1, the second and the fourth
        (MuGRPO(kappa=0.3), [1, 1, 0, 0, 0, 0]),
        (MuGRPO(kappa=0.3, keeps_trigger=False), [1, 0, 0, 0, 0, 0]),
        (MuGRPO(kappa=0.3, scope="token"), [1, 0, 1, 0, 1, 1]),
        (MuGRPO(kappa=0.3, scope="response"), [0, 0, 0, 0, 0, 0]),
        # above 1.5: triggers are 2 and 6, the third and the fifth
        (MuGRPO(trigger="above", kappa=1.5), [1, 1, 1, 0, 0, 0]),
        (MuGRPO(trigger="above", kappa=1.5, scope="token"), [1, 1, 0, 1, 0, 1]),
        # nothing below .05; and no veto at all
        (MuGRPO(kappa=0.05), [1] * 6),
        (MuGRPO(trigger="none"), [1] * 6),
    ],
    ids=repr,
)
def test_by_hand(objective: MuGRPO, kept: list[int]) -> None:
    outcome = run(objective, STEP)
    assert outcome.gradient.tolist() == pytest.approx(failed(kept) + SUCCEEDED, rel=1e-12)
    # loss: failed -(-rho), succeeded -2 rho, 2 * 5 where clipped
    clipped = 2 * (1.0 + 0.2 + 2.0 + 0.1 + 5.0 + 0.5)
    assert outcome.loss == pytest.approx(sum(failed(kept)) - clipped / N, rel=1e-12)
    assert outcome.sums["clip_hits"] == outcome.sums["clip_hits_high"] == 1
    assert outcome.prepared.measured == pytest.approx(
        {
            "veto_tokens": (6 - sum(kept)) / N,
            "veto_responses": 0.0 if sum(kept) == 6 else 0.5,
            "ratio_max_negative": 6.0,
        }
    )


def test_nothing_to_veto_without_failures() -> None:
    measured = run(MuGRPO(), scored_step([LOGS], [1.0])).prepared.measured
    assert measured == {"veto_tokens": 0.0, "veto_responses": 0.0, "ratio_max_negative": 0.0}


def test_token_wise_advantages_are_vetoed_by_their_own_sign() -> None:
    # Ratios 1, .2 (trigger), 2, .1 with A = -1, -1, 1, -1: of what follows the trigger only the last has A < 0.
    step = scored_step([LOGS[:4]], [-1.0])
    signed = dataclasses.replace(step, advantages=torch.tensor([-1.0, -1.0, 1.0, -1.0], dtype=torch.float64))
    for scope, slopes in (("suffix", [1, 0.2, -2, 0]), ("response", [0, 0, -2, 0])):
        gradient = run(MuGRPO(scope=scope), signed).gradient  # type: ignore[arg-type]
        assert gradient.tolist() == pytest.approx([x / 4 for x in slopes], rel=1e-12)


def slow_kept(step: ScoredStep, t: int, trigger: Trigger, scope: Scope, kappa: float, keeps_trigger: bool) -> bool:
    """Token by token, without any tensor operation."""
    if step.advantages[t] >= 0:
        return True
    tokens = [s for s in range(len(step.row)) if step.row[s] == step.row[t] and step.sampled[s]]
    ratios = {s: math.exp(float(step.logprobs[s] - step.rollout_logprobs[s])) for s in tokens}
    hits = [s for s, ratio in ratios.items() if (ratio < kappa if trigger == "below" else ratio > kappa)]
    if trigger == "none" or not hits:
        return True
    if scope == "suffix":
        return t < hits[0] or (keeps_trigger and t == hits[0])
    return scope == "token" and t not in hits


@pytest.mark.parametrize(("trigger", "kappa"), [("below", 0.8), ("above", 1.2), ("none", 0.3)])
@pytest.mark.parametrize("scope", ["suffix", "token", "response"])
@pytest.mark.parametrize("keeps_trigger", [True, False])
@settings(max_examples=examples(15))
@given(step=scored_steps())
def test_gradient_matches_a_slow_reference(
    trigger: Trigger, kappa: float, scope: Scope, keeps_trigger: bool, step: ScoredStep
) -> None:
    leaf = step.logprobs.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for t in torch.nonzero(step.sampled).flatten().tolist():
        if slow_kept(step, t, trigger, scope, kappa, keeps_trigger):
            ratio, advantage = (leaf[t] - step.rollout_logprobs[t]).exp(), step.advantages[t]
            total = total - torch.minimum(ratio * advantage, ratio.clamp(0.5, 2.0) * advantage)
    loss = total / step.sampled.sum()
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    expected = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    objective = MuGRPO(
        ratio_min=0.5, ratio_max=2.0, trigger=trigger, kappa=kappa, scope=scope, keeps_trigger=keeps_trigger
    )
    torch.testing.assert_close(run(objective, step).gradient, expected, rtol=1e-9, atol=1e-12)


@settings(max_examples=examples(20))
@given(step=scored_steps())
def test_without_a_veto_it_is_the_clip_of_its_range(step: ScoredStep) -> None:
    mine = run(MuGRPO(ratio_min=0.8, ratio_max=1.2, trigger="none"), step)
    clipped = run(Clipped(), step)
    torch.testing.assert_close(mine.gradient, clipped.gradient)
    assert mine.sums == clipped.sums


@pytest.mark.parametrize(
    ("trigger", "kappa"),
    [("below", 1.5), ("above", 0.3), ("below", 0.0), ("below", -1.0), ("above", math.inf), ("below", math.nan)],
)
def test_a_kappa_that_vetoes_on_policy_tokens_is_refused(trigger: Trigger, kappa: float) -> None:
    with pytest.raises(ValueError, match="kappa"):
        MuGRPO(trigger=trigger, kappa=kappa)
