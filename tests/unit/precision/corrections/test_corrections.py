"""Corrections: factors worked out by hand, levels, vetoes, extremes; and the objective that carries one."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from precision.corrections import MIS, OPSM, TIS, Corrected, Correction, IcePop, Rejection
from precision.objectives.clipped import Clipped
from precision.objectives.objective import Facts, Prepared, ScoredStep
from tests.support.examples import examples
from tests.support.objectives import reordered, run, scored_step, scored_steps, soiled

LN2, LN3 = math.log(2.0), math.log(3.0)
CORRECTIONS: list[Correction] = [
    TIS(),
    TIS(level="sequence"),
    MIS(veto=1e-4),
    MIS(level="sequence", normalized=True),
    MIS(level="geometric", low=0.9, high=1.1),
    Rejection(),
    Rejection(veto=0.01),
    Rejection(level="sequence"),
    Rejection(level="geometric", low=0.999, high=1.001),
    IcePop(),
    OPSM(),
]
each = pytest.mark.parametrize("correction", CORRECTIONS, ids=repr)

# Two responses. k of the first: 2, 3, 1/2 (product 3, geometric mean 3^(1/3)); of the second: 1, 1/4 (product 1/4,
# geometric mean 1/2). A is +1 and -1.
K = [[LN2, LN3, -LN2], [0.0, -2 * LN2]]


def by_hand() -> ScoredStep:
    return scored_step(K, [1.0, -1.0])


def assert_factor(factor: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(factor, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0.0)


def test_tis_by_hand() -> None:
    factor, measured = TIS(cap=2.5).factor(by_hand())
    assert_factor(factor, [2, 2.5, 0.5, 1, 0.25])
    assert measured == {
        "correction_factor": pytest.approx(6.25 / 5),
        "correction_capped_positive": pytest.approx(1 / 5),
        "correction_capped_negative": 0.0,
    }
    factor, measured = TIS(cap=2.0, level="sequence").factor(by_hand())
    assert_factor(factor, [2, 2, 2, 0.25, 0.25])  # 3 is capped
    assert measured["correction_capped_positive"] == pytest.approx(3 / 5)


def test_mis_by_hand() -> None:
    # Bounds are closed: 2 and 1/2 stay. The bounds are widened by an ulp or so, as exp(log 2) need not be 2.
    low, high = 0.5 - 1e-9, 2 + 1e-9
    factor, measured = MIS(low=low, high=high).factor(by_hand())
    assert_factor(factor, [2, 0, 0.5, 1, 0])
    assert measured == {
        "correction_factor": pytest.approx(3.5 / 5),
        "correction_masked_positive": pytest.approx(1 / 5),
        "correction_masked_negative": pytest.approx(1 / 5),
    }
    assert_factor(MIS(low=low, high=4.0, level="sequence").factor(by_hand())[0], [3, 3, 3, 0, 0])
    cube = 3 ** (1 / 3)
    assert_factor(MIS(low=low, high=high, level="geometric").factor(by_hand())[0], [cube, cube, cube, 0.5, 0.5])


def test_mis_normalised_by_hand() -> None:
    # Kept: 2, 1/2, 1, mean 7/6. Dropped tokens are not made up for: the sum is 3 of 5 tokens.
    factor, measured = MIS(low=0.5 - 1e-9, high=2 + 1e-9, normalized=True).factor(by_hand())
    assert_factor(factor, [12 / 7, 0, 3 / 7, 6 / 7, 0])
    assert measured["correction_factor"] == pytest.approx(3 / 5)
    # Sequences: 3 and 1/4, mean 13/8, each response counted once whatever its length.
    factor, _ = MIS(low=0.1, high=4.0, level="sequence", normalized=True).factor(by_hand())
    assert_factor(factor, [24 / 13] * 3 + [2 / 13] * 2)
    nothing, _ = MIS(low=10.0, high=20.0, normalized=True).factor(by_hand())
    assert (nothing == 0).all()


def test_rejection_by_hand() -> None:
    assert_factor(Rejection(low=0.4, high=2.1).factor(by_hand())[0], [1, 0, 1, 1, 0])
    assert_factor(Rejection(level="sequence", low=0.2, high=2.0).factor(by_hand())[0], [0, 0, 0, 1, 1])
    assert_factor(Rejection(level="geometric", low=0.9, high=1.5).factor(by_hand())[0], [1, 1, 1, 0, 0])


def test_a_veto_takes_the_whole_response() -> None:
    # The second response has a k of 1/4; it goes although all of its tokens are within the bounds.
    factor, measured = Rejection(level="token", low=0.1, high=9.0, veto=0.26).factor(by_hand())
    assert_factor(factor, [1, 1, 1, 0, 0])
    assert measured["correction_masked_negative"] == pytest.approx(2 / 5)
    assert_factor(MIS(level="token", low=0.1, high=9.0, veto=0.26).factor(by_hand())[0], [2, 3, 0.5, 0, 0])
    assert_factor(Rejection(level="token", low=0.1, high=9.0, veto=0.24).factor(by_hand())[0], [1] * 5)


def test_the_veto_reads_ratios_that_are_not_clamped() -> None:
    # k = e^-25 is clamped to e^-20 for the bounds; a veto at e^-22 lies between the two.
    step = scored_step([[-25.0, 0.0]], [1.0])
    assert (Rejection(level="token", low=0.0, high=2.0, veto=math.exp(-22)).factor(step)[0] == 0).all()
    assert_factor(Rejection(level="token", low=math.exp(-21), high=2.0).factor(step)[0], [1, 1])


def test_icepop_by_hand() -> None:
    factor, measured = IcePop(low=0.4, high=2.5).factor(by_hand())
    assert_factor(factor, [2, 0, 0.5, 1, 0])
    assert measured["correction_factor"] == pytest.approx(3.5 / 5)
    edges = [math.log(k) for k in (4.9, 5.1, 0.51, 0.49)]
    assert_factor(IcePop().factor(scored_step([edges], [1.0]))[0], [4.9, 0, 0.51, 0])


def test_opsm_by_hand() -> None:
    # mean_t log(pi_b / pi), A: .1, -1: dropped. .1, +1: kept. -.1, -1: kept. (.3 - .1)/2 = .1, -1: dropped whole.
    # (.08 + 0)/2 = .04, -1: within delta .05, kept.
    step = scored_step([[-0.1], [-0.1], [0.1], [-0.3, 0.1], [-0.08, 0.0]], [-1.0, 1.0, -1.0, -1.0, -1.0])
    factor, measured = OPSM(delta=0.05).factor(step)
    assert_factor(factor, [0, 1, 1, 0, 0, 1, 1])
    assert measured == {
        "correction_factor": pytest.approx(4 / 7),
        "correction_masked_positive": 0.0,
        "correction_masked_negative": pytest.approx(3 / 7),
    }


def test_opsm_measures_from_the_engine_not_from_the_proximal_policy() -> None:
    step = scored_step([[-0.1]], [-1.0], old=[[-0.1]])
    assert_factor(OPSM().factor(step)[0], [0.0])


def test_all_others_read_the_proximal_policy_not_the_present_one() -> None:
    step = scored_step([[5.0]], [1.0], old=[[LN2]])
    for correction in (TIS(cap=3.0), IcePop(), MIS(high=3.0)):
        assert_factor(correction.factor(step)[0], [2.0])


@each
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_long_products_and_absurd_ratios_stay_finite(correction: Correction, size: float) -> None:
    factor, measured = correction.factor(scored_step([[size] * 50, [0.0]], [1.0, -1.0]))
    assert factor.isfinite().all()
    assert (factor >= 0).all()
    assert all(math.isfinite(value) for value in measured.values())


@each
def test_without_mismatch_every_factor_is_one(correction: Correction) -> None:
    factor, measured = correction.factor(scored_step([[0.0, 0.0], [0.0]], [1.0, -1.0]))
    assert_factor(factor, [1, 1, 1])
    assert measured["correction_factor"] == 1.0
    assert sum(measured.values()) == 1.0  # all shares are 0


@each
@settings(max_examples=examples(40))
@given(step=scored_steps(), garbage=st.sampled_from([math.nan, math.inf, -math.inf, -120.0, 3e38]))
def test_forced_tokens_and_order_do_not_matter(correction: Correction, step: ScoredStep, garbage: float) -> None:
    factor, measured = correction.factor(step)
    dirty, dirty_measured = correction.factor(soiled(step, garbage))
    assert torch.equal(factor[step.sampled], dirty[step.sampled])
    assert measured == dirty_measured
    assert factor[step.sampled].isfinite().all()
    assert (factor[step.sampled] >= 0).all()
    moved_step, index = reordered(step)
    moved, moved_measured = correction.factor(moved_step)
    torch.testing.assert_close(moved[step.sampled[index]], factor[index][step.sampled[index]], rtol=1e-12, atol=1e-15)
    assert moved_measured == pytest.approx(measured, rel=1e-12)


@each
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_broken_logprobs_raise(correction: Correction, bad: float) -> None:
    step = by_hand()
    field = "logprobs" if isinstance(correction, OPSM) else "old_logprobs"
    values = getattr(step, field).clone()
    values[1] = bad
    with pytest.raises(FloatingPointError, match="1 of 5 tokens"):
        correction.factor(dataclasses.replace(step, **{field: values}))


@settings(max_examples=examples(40))
@given(step=scored_steps())
def test_corrected_gradient_is_the_factor_times_the_gradient(step: ScoredStep) -> None:
    """A factor on A is a factor on the term, whichever side of the clip a token is on; N stays."""
    inner = Clipped(clip_low=0.2, clip_high=0.28, anchor="old")
    for correction in (TIS(), MIS(veto=1e-4), IcePop(), Rejection(level="token")):
        plain, corrected = run(inner, step), run(Corrected(inner=inner, correction=correction), step)
        factor = torch.where(step.sampled, correction.factor(step)[0], 0.0)
        torch.testing.assert_close(corrected.gradient, plain.gradient * factor, rtol=1e-12, atol=1e-15)


def test_tis_with_a_proximal_anchor_is_the_plain_importance_weight() -> None:
    # k * r = (pi_prox / pi_b)(pi / pi_prox) = pi / pi_b. k = 1.5, r = 1.1: A = 1, N = 1: slope -1.65.
    step = scored_step([[math.log(1.65)]], [1.0], old=[[math.log(1.5)]])
    corrected = run(Corrected(inner=Clipped(anchor="old"), correction=TIS()), step)
    assert corrected.gradient.tolist() == pytest.approx([-1.65], rel=1e-6)


def test_corrected_hands_on_what_both_measured_and_needs_scoring() -> None:
    class Measuring(Clipped):
        @property
        def facts(self) -> Facts:
            return Facts(needs_scoring=True)

        def prepare(self, step: ScoredStep) -> Prepared:
            seen.append(step.advantages)
            return Prepared(advantages=step.advantages, step_ess=0.5, measured={"own": 1.0})

    seen: list[Tensor] = []
    objective = Corrected(inner=Measuring(), correction=OPSM(delta=0.05))
    prepared = objective.prepare(scored_step([[-0.1], [0.0]], [-1.0, 2.0]))
    assert objective.facts.needs_scoring
    assert seen[0].tolist() == [0.0, 2.0]  # the inner objective sees corrected advantages
    assert prepared.step_ess == 0.5
    assert prepared.measured == {
        "own": 1.0,
        "correction_factor": 0.5,
        "correction_masked_positive": 0.0,
        "correction_masked_negative": 0.5,
    }
