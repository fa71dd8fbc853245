"""GSPO: by hand, and its gradient against autograd of the paper's objective over whole responses."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from precision.objectives.clipped import GSPO
from precision.objectives.objective import ScoredStep, StepContext, TokenBatch
from tests.support.examples import examples
from tests.support.objectives import run, scored_step, scored_steps

Anchor = Literal["rollout", "old"]
ANCHORS: tuple[Anchor, ...] = ("rollout", "old")


def test_by_default_the_engine_s_mismatch_clips_nothing() -> None:
    """Before anything was learned s is 1, however far each response lies from the engine that sampled it."""
    step = scored_step([[-2e-3] * 8, [1e-3] * 8], [-1.0, 1.0], old=[[0.0] * 8] * 2)
    step = dataclasses.replace(step, old_logprobs=step.logprobs)
    assert GSPO().prepare(step).measured["clip_hits"] == 0
    assert GSPO(anchor="rollout").prepare(step).measured["clip_hits"] == 1


def test_by_hand() -> None:
    # Mean log-ratios .1, -.2, .3, -.3, so s = e^.1, e^-.2, e^.3, e^-.3; bounds .8 and 1.2. The first two are kept
    # (e^-.2 = .82), the third is clipped above (A > 0, 1.35), the fourth below (A < 0, .74). N = 7.
    step = scored_step([[0.5, -0.3], [-0.2], [0.3, 0.3], [-0.1, -0.5]], [2.0, -1.0, 1.0, -1.0])
    outcome = run(GSPO(clip_low=0.2, clip_high=0.2, anchor="rollout"), step)
    kept = [2 * math.exp(0.1), 2 * math.exp(0.1), -math.exp(-0.2), 0, 0, 0, 0]
    assert outcome.gradient.tolist() == pytest.approx([-x / 7 for x in kept], rel=1e-12)
    assert outcome.prepared.measured == pytest.approx(
        {
            "clip_hits": 4 / 7,
            "clip_hits_high": 2 / 7,
            "clip_hits_low": 2 / 7,
            "weight": (2 * math.exp(0.1) + math.exp(-0.2)) / 7,
        }
    )
    log_ratios = [0.5, -0.3, -0.2, 0.3, 0.3, -0.1, -0.5]
    assert outcome.sums == pytest.approx({"k3": sum(math.expm1(x) - x for x in log_ratios)})


def test_the_clip_is_pessimistic() -> None:
    # A > 0 below the floor and A < 0 above the ceiling keep their gradient, s A.
    outcome = run(GSPO(anchor="rollout"), scored_step([[-1.0], [1.0]], [1.0, -1.0]))
    assert outcome.gradient.tolist() == pytest.approx([-math.exp(-1) / 2, math.exp(1) / 2], rel=1e-12)


def paper_gradient(step: ScoredStep, anchor: Tensor, low: float, high: float) -> Tensor:
    """Slow: of minus the mean over responses of min(s A, clip(s) A), response by response, by autograd."""
    leaf = step.logprobs.clone().requires_grad_()
    responses = [torch.nonzero((step.row == row) & step.sampled).flatten() for row in range(len(step.offsets) - 1)]
    terms = []
    for tokens in responses:
        if len(tokens):
            s = ((leaf[tokens].sum() - anchor[tokens].sum()) / len(tokens)).exp()
            advantage = step.advantages[tokens[0]]
            terms.append(torch.minimum(s * advantage, s.clamp(1 - low, 1 + high) * advantage))
    (-torch.stack(terms).sum() / (len(step.offsets) - 1)).backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("anchor", ANCHORS)
@settings(max_examples=examples(60))
@given(step=scored_steps(), low=st.sampled_from([3e-4, 0.1, 1.0]), high=st.sampled_from([4e-4, 0.1, 1e30]))
def test_gradient_is_that_of_the_paper(anchor: Anchor, step: ScoredStep, low: float, high: float) -> None:
    """With the factor N / (R |y|) of sequence aggregation on the advantages, which turns the mean over tokens into the
    mean over responses."""
    lengths = step.row_sum(step.sampled).clamp(min=1)[step.row]
    by_sequence = step.advantages * step.sampled.sum() / ((len(step.offsets) - 1) * lengths)
    objective = GSPO(clip_low=low, clip_high=high, anchor=anchor)
    gradient = run(objective, dataclasses.replace(step, advantages=by_sequence)).gradient
    chosen = step.old_logprobs if anchor == "old" else step.rollout_logprobs
    torch.testing.assert_close(gradient, paper_gradient(step, chosen, low, high), rtol=1e-9, atol=1e-12)


def test_the_clip_does_not_follow_rounding_of_the_training_pass() -> None:
    """Log-probabilities of the training pass that are off by 1e-2, thirty times the width of the clip, change nothing:
    ratios and clips are those of the scored step."""
    step = scored_step([[1e-4, -1e-4], [5e-4, 5e-4]], [1.0, -1.0])
    objective = GSPO(anchor="rollout")
    prepared = objective.prepare(step)
    assert prepared.measured["clip_hits"] == 0
    leaf = (step.logprobs + torch.tensor([0.01, -0.01, -0.01, 0.01]))[None].requires_grad_()
    batch = TokenBatch(
        rollout_logprobs=step.rollout_logprobs[None], advantages=prepared.advantages[None], mask=step.sampled[None]
    )
    objective.loss(leaf, batch, StepContext(num_tokens=4))[0].backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert leaf.grad[0].tolist() == pytest.approx([-0.25, -0.25, math.exp(5e-4) / 4, math.exp(5e-4) / 4], rel=1e-12)


def test_long_responses_do_not_overflow() -> None:
    # 10,000 tokens of .1 nats: the product is e^1000, the geometric mean e^.1.
    outcome = run(GSPO(clip_high=1.0, anchor="rollout"), scored_step([[0.1] * 10_000], [1.0]))
    assert outcome.gradient.sum().item() == pytest.approx(-math.exp(0.1), rel=1e-9)
