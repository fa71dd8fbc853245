"""Split: by hand, its gradient against autograd of the stated coefficient, its anchor against enumeration, its limit
CISPO."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precision.objectives.cispo import CISPO
from precision.objectives.objective import ScoredStep, StepContext, TokenBatch
from precision.objectives.p3o import Split
from tests.support.examples import examples
from tests.support.objectives import ROLLOUT, run, scored_step, scored_steps

LN2, LN3 = math.log(2.0), math.log(3.0)


def test_by_hand() -> None:
    # Two tokens. w_q = 1 and 2, w_s = 3 and 1/2: rho = 3 and 1.
    # e = (3 + 1)^2 / ((1 + 2) (3 * 3 + 1 * 1/2)) = 16 / 28.5.
    step = scored_step([[LN3], [0.0]], [2.0, -1.0], old=[[0.0], [LN2]])
    outcome = run(Split(cap=2.0), step)
    e = 16 / 28.5
    assert outcome.prepared.step_ess == pytest.approx(e)
    assert outcome.prepared.measured == {"staleness_ess": pytest.approx(e)}
    # K = rho l_s - rho + w_q: 3 ln 3 - 3 + 1, and -ln 2 - 1 + 2.
    kl = 3 * LN3 - 2 + 1 - LN2
    assert outcome.sums["kl"] == pytest.approx(kl)
    assert outcome.sums["cap_hits"] == 1
    assert outcome.sums["weight"] == 3
    policy = -2 * 2 * (ROLLOUT + LN3) + 1 * 1 * ROLLOUT
    assert outcome.sums["policy_loss"] == pytest.approx(policy)
    assert outcome.loss == pytest.approx((policy + (1 - e) * kl) / 2)
    # g = -min(rho, cap) (A - (1 - e) l_s), over two tokens.
    expected = [-2 * (2 - (1 - e) * LN3) / 2, -1 * (-1 + (1 - e) * LN2) / 2]
    assert outcome.gradient.tolist() == pytest.approx(expected)


@settings(max_examples=examples(60))
@given(step=scored_steps(), cap=st.sampled_from([1.0, 1.5, 5.0]))
def test_gradient_is_the_stated_coefficient(step: ScoredStep, cap: float) -> None:
    outcome = run(Split(cap=cap), step)
    new, old, engine = (x[step.sampled] for x in (step.logprobs, step.old_logprobs, step.rollout_logprobs))
    rho, mismatch, staleness = (new - engine).exp(), (old - engine).exp(), (new - old).exp()
    e = min(1.0, float(rho.sum() ** 2 / (mismatch.sum() * (rho * staleness).sum())))
    leaf = new.clone().requires_grad_()
    coefficient = rho.clamp(max=cap) * (step.advantages[step.sampled] - (1 - e) * (new - old))
    (-(coefficient * leaf).sum() / len(leaf)).backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    torch.testing.assert_close(outcome.gradient[step.sampled], leaf.grad, rtol=1e-6, atol=1e-8)


@settings(max_examples=examples(40))
@given(step=scored_steps(), cap=st.sampled_from([1.0, 5.0]))
def test_where_the_old_policy_is_the_present_one_it_is_cispo(step: ScoredStep, cap: float) -> None:
    step = dataclasses.replace(step, old_logprobs=step.logprobs)
    split, cispo = run(Split(cap=cap), step), run(CISPO(cap=cap), step)
    torch.testing.assert_close(split.gradient, cispo.gradient, rtol=1e-9, atol=1e-12)


def test_the_anchor_is_unbiased_for_the_kl_to_the_policy_that_sampled() -> None:
    """Value and gradient of K, over the engine's exact shares, against KL(pi || pi_old) by enumeration."""
    engine, old = (torch.tensor(p, dtype=torch.float64) for p in ([0.5, 0.25, 0.15, 0.1], [0.4, 0.2, 0.1, 0.3]))
    tokens = torch.arange(4).repeat_interleave((20 * engine).long()).unsqueeze(0)
    logits = torch.tensor([-0.9, 0.4, 0.1, 0.6], dtype=torch.float64)

    def gradient_of(estimated: bool) -> tuple[float, torch.Tensor]:
        leaf = logits.clone().requires_grad_()
        logprobs = leaf.log_softmax(0)
        if estimated:
            batch = TokenBatch(
                rollout_logprobs=engine.log()[tokens],
                advantages=torch.zeros(tokens.shape, dtype=torch.float64),
                mask=torch.ones(tokens.shape, dtype=torch.bool),
                anchor_logprobs=old.log()[tokens],
            )
            context = StepContext(num_tokens=20, step_ess=0.25)
            loss, _ = Split(cap=100.0).loss(logprobs[tokens], batch, context)
            value = loss / 0.75
        else:
            value = (logprobs.exp() * (logprobs - old.log())).sum()
        value.backward()  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        return value.item(), leaf.grad

    (estimate, slope), (exact, exact_slope) = gradient_of(True), gradient_of(False)
    assert estimate == pytest.approx(exact, rel=1e-12)
    torch.testing.assert_close(slope, exact_slope, rtol=1e-12, atol=1e-12)


def test_it_asks_for_what_it_needs() -> None:
    split = Split()
    assert split.facts.needs_scoring
    assert split.facts.needs_old_logprobs
    assert split.facts.needs_sampling_logprobs
    assert split.facts.reads_step_logprobs
    assert split.facts.weighs_by_rollout_ratio, "a correction by pi_old / pi_engine would count the mismatch twice"
