from __future__ import annotations

import math

import pytest
import torch

from precision.objectives.clipped import Clipped
from precision.objectives.objective import ScoredStep, StepContext, TokenBatch
from precision.supervised import Supervised
from tests.support.objectives import run, scored_step

RATIOS = [1.5, 1.1, 0.5, 1.5, 0.5, 0.9, 0.7, 1.4, 1.6]
ADVANTAGES = [2.0, 2.0, 2.0, -1.0, -1.0, -1.0, -2.0, 1.0, 1.0]
# min(rho A, clip(rho, .8, 1.28) A): 1.28 * 2 = 2.56 (clipped), 2.2, 1.0, -1.5 (pessimistic), -.8 (clipped), -.9,
# -1.6 (clipped), 1.28 (clipped), 1.28 (clipped): three tokens clipped above, two below
SURROGATE = 2.56 + 2.2 + 1.0 - 1.5 - 0.8 - 0.9 - 1.6 + 1.28 + 1.28
# d(rho A)/d log pi = rho A where not clipped
SLOPES = [0.0, 2.2, 1.0, -1.5, 0.0, -0.9, 0.0, 0.0, 0.0]
DAPO = Clipped(clip_low=0.2, clip_high=0.28)


def step_with(ratios: list[float], *, engine: float = 0.0) -> ScoredStep:
    """One token a response; pi / pi_prox = ratio, and the engine off by `engine` nats."""
    proximal = [[engine]] * len(ratios)
    return scored_step([[math.log(r) + engine] for r in ratios], ADVANTAGES[: len(ratios)], old=proximal)


def test_all_cases_by_hand() -> None:
    outcome = run(DAPO, step_with(RATIOS))
    assert outcome.loss == pytest.approx(-SURROGATE / 9, rel=1e-12)
    assert outcome.gradient.tolist() == pytest.approx([-slope / 9 for slope in SLOPES], rel=1e-12)
    k3 = sum(r - 1 - math.log(r) for r in RATIOS)
    assert outcome.sums == pytest.approx({"clip_hits": 5, "clip_hits_high": 3, "clip_hits_low": 2, "k3": k3})
    assert not DAPO.facts.needs_scoring


def test_proximal_anchor_divides_by_the_learners_own_and_leaves_k3_to_the_sampler() -> None:
    # The engine is off by .7 nats on every token. Anchored to pi_prox the ratios, hence loss and slopes, are those by
    # hand; k3 is of pi / pi_b = e^.7 r.
    objective = Clipped(clip_low=0.2, clip_high=0.28, anchor="old")
    outcome = run(objective, step_with(RATIOS, engine=0.7))
    assert objective.facts.needs_scoring
    assert outcome.loss == pytest.approx(-SURROGATE / 9, rel=1e-12)
    assert outcome.gradient.tolist() == pytest.approx([-slope / 9 for slope in SLOPES], rel=1e-12)
    k3 = sum(math.exp(0.7) * r - 1 - math.log(r) - 0.7 for r in RATIOS)
    assert outcome.sums == pytest.approx({"clip_hits": 5, "clip_hits_high": 3, "clip_hits_low": 2, "k3": k3})
    # Anchored to the rollout the same step is clipped at e^.7 times the ratio.
    assert run(DAPO, step_with(RATIOS, engine=0.7)).sums["clip_hits_low"] == 0


def test_dual_clip_by_hand() -> None:
    # c = 3. A = -1: rho 2 -> -2 (as PPO), 4 -> -3 (bounded, no slope), .5 -> -.8 (clipped). A = 2, rho 4 -> 2.4.
    step = scored_step([[math.log(r)] for r in (2.0, 4.0, 0.5, 4.0)], [-1.0, -1.0, -1.0, 2.0])
    outcome = run(Clipped(dual_clip=3.0), step)
    assert outcome.loss == pytest.approx((2 + 3 + 0.8 - 2.4) / 4, rel=1e-12)
    assert outcome.gradient.tolist() == pytest.approx([2 / 4, 0, 0, 0], rel=1e-12)
    assert (outcome.sums["dual_clip_hits"], outcome.sums["clip_hits"]) == (1, 2)
    assert "dual_clip_hits" not in run(Clipped(), step).sums


def test_without_bounds_it_is_importance_sampling() -> None:
    step = step_with(RATIOS)
    outcome = run(Clipped(clip_low=1.0, clip_high=1e30), step)
    expected = [-r * a / 9 for r, a in zip(RATIOS, ADVANTAGES, strict=True)]
    assert outcome.gradient.tolist() == pytest.approx(expected, rel=1e-12)
    assert outcome.sums["clip_hits"] == 0
    torch.testing.assert_close(run(Clipped(dual_clip=1e9), step).gradient, run(Clipped(), step).gradient)


@pytest.mark.parametrize("dual_clip", [1.0, 0.5, -3.0, math.nan])
def test_a_dual_clip_that_would_touch_on_policy_tokens_is_refused(dual_clip: float) -> None:
    with pytest.raises(ValueError, match="dual_clip"):
        Clipped(dual_clip=dual_clip)


def test_supervised_is_cross_entropy_and_ignores_the_sampler() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -4.0]], requires_grad=True)
    batch = TokenBatch(
        rollout_logprobs=torch.full((1, 3), math.nan),
        advantages=torch.ones(1, 3),
        mask=torch.tensor([[True, True, False]]),
    )
    loss, sums = Supervised().loss(logprobs, batch, StepContext(num_tokens=2))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 1.5  # (1 + 2) / 2
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-0.5, -0.5, 0.0]]
    assert sums["nll"] == 3
    assert not Supervised().facts.needs_scoring
