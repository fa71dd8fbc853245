"""RatioSums: every statistic by hand, merging, masking, bins."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from precision.ratios import (
    LOG_RATIO_EDGES,
    MAX_LOG_RATIO,
    NUM_LOG_RATIO_BINS,
    RatioSums,
    ess_from_sums,
    importance_kl,
    official_kl,
    sequence_ess_of_totals,
    staleness_ess,
    token_ess,
)

# Metrics and dashboards read these names.
NAMES = ["ess", "chi2", "k1_kl", "k2_kl", "k3_kl", "log_ratio_mean", "log_ratio_abs_mean"]
NAMES += ["ratio_mean", "ratio_max", "ratio_min", "ratio_above_2_share", "ratio_below_half_share"]
NAMES += ["ratio_above_10_share", "ratio_below_tenth_share", "probability_error", "probability_gap_abs_mean"]
NAMES += ["logprob_pearson", "probability_pearson", "num_tokens"]


def sums_of(log_ratios: list[float]) -> RatioSums:
    learner = torch.tensor([log_ratios], dtype=torch.float64)
    return RatioSums.from_logprobs(learner, torch.zeros_like(learner), torch.ones_like(learner, dtype=torch.bool))


def test_statistics_by_hand() -> None:
    # l = ln 2, ln 1/2: rho = 2, 1/2; S1 = 2.5, S2 = 4.25, N = 2.
    # ess = 6.25 / 8.5; chi2 = 2.125 - 1; k3 = (2 - 1 - ln 2 + .5 - 1 + ln 2) / 2 = .25
    learner = torch.tensor([[-1.0 + math.log(2.0), -3.0 - math.log(2.0), math.nan]], dtype=torch.float64)
    rollout = torch.tensor([[-1.0, -3.0, -math.inf]], dtype=torch.float64)
    # p = 2/e, e^-3/2 and q = 1/e, e^-3: both rise from the second token to the first, so with two tokens r = 1.
    statistics = RatioSums.from_logprobs(learner, rollout, torch.tensor([[True, True, False]])).statistics()
    expected = {
        "ess": 6.25 / 8.5,
        "chi2": 1.125,
        "k1_kl": 0.0,
        "k2_kl": math.log(2.0) ** 2 / 2,
        "k3_kl": 0.25,
        "log_ratio_mean": 0.0,
        "log_ratio_abs_mean": math.log(2.0),
        "ratio_mean": 1.25,
        "ratio_max": 2.0,
        "ratio_min": 0.5,
        "ratio_above_10_share": 0.0,
        "ratio_below_tenth_share": 0.0,
        "probability_error": 2.0,
        "probability_gap_abs_mean": (math.exp(-1.0) + math.exp(-3.0) / 2) / 2,
        "logprob_pearson": 1.0,
        "probability_pearson": 1.0,
        "num_tokens": 2.0,
    }
    assert list(statistics) == NAMES
    at_a_bound = ("ratio_above_2_share", "ratio_below_half_share")  # which side of it, rounding decides
    known = {name: value for name, value in statistics.items() if name not in at_a_bound}
    assert known == pytest.approx(expected, abs=1e-8)


def test_shares_beyond_a_factor() -> None:
    statistics = sums_of([math.log(3), math.log(11), -math.log(3), -math.log(11), 0.0]).statistics()
    assert statistics["ratio_above_2_share"] == statistics["ratio_below_half_share"] == 0.4
    assert statistics["ratio_above_10_share"] == statistics["ratio_below_tenth_share"] == 0.2


def test_a_side_that_does_not_vary_has_no_correlation() -> None:
    statistics = sums_of([0.25, 0.5]).statistics()  # the rollout side is 0 throughout
    assert not {"logprob_pearson", "probability_pearson"} & statistics.keys()


def test_k3_keeps_its_digits_when_the_sides_nearly_agree() -> None:
    # rho - 1 - log rho = l^2 / 2 + …: 5e-19 at l = 1e-9, where doubles around 1 are 2e-16 apart.
    assert sums_of([1e-9]).statistics()["k3_kl"] == pytest.approx(5e-19, rel=1e-3, abs=0.0)


def test_k3_estimates_kl_from_sampler_to_learner() -> None:
    rollout = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    learner = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    counts = torch.tensor([7, 2, 1])  # the exact rollout frequencies of ten tokens
    tokens = torch.repeat_interleave(torch.arange(3), counts)[None]
    sums = RatioSums.from_logprobs(learner.log()[tokens], rollout.log()[tokens], torch.ones_like(tokens).bool())
    forward = float((rollout * (rollout / learner).log()).sum())
    assert sums.statistics()["k3_kl"] == pytest.approx(forward, rel=1e-9)
    assert sums.statistics()["ratio_mean"] == pytest.approx(1.0, rel=1e-9)
    assert sums.statistics()["chi2"] == pytest.approx(float((learner**2 / rollout).sum()) - 1, rel=1e-9)


@given(st.lists(st.floats(-20, 20), min_size=2, max_size=30), st.data())
def test_merging_equals_the_whole(log_ratios: list[float], data: Any) -> None:
    cut = data.draw(st.integers(0, len(log_ratios)))
    whole = sums_of(log_ratios)
    parts = [sums_of(log_ratios[cut:]), sums_of(log_ratios[:cut])]
    torch.testing.assert_close(parts[0].sums + parts[1].sums, whole.sums, rtol=1e-12, atol=1e-9)
    assert torch.equal(torch.maximum(parts[0].maxima, parts[1].maxima), whole.maxima)
    assert torch.equal(parts[0].histogram + parts[1].histogram, whole.histogram)


def test_histogram_bins_underflow_zero_and_overflow() -> None:
    histogram = sums_of([-50.0, -50.0, 0.0, LOG_RATIO_EDGES[-1], LOG_RATIO_EDGES[0]]).histogram
    assert histogram.shape == (NUM_LOG_RATIO_BINS,)
    assert histogram[0] == 2  # below the first edge
    assert histogram[1] == 1  # an edge belongs to the bin above it
    assert histogram[NUM_LOG_RATIO_BINS // 2] == 1
    assert histogram[-1] == 1
    assert histogram.sum() == 5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, MAX_LOG_RATIO + 1])
def test_unusable_log_ratio_raises(bad: float) -> None:
    with pytest.raises(FloatingPointError, match="1 of 2 tokens"):
        sums_of([0.0, bad])


def test_ratio_that_underflows_is_a_number() -> None:
    assert sums_of([-5000.0, 0.0]).statistics()["ratio_min"] == 0.0


def test_without_tokens_there_are_no_statistics() -> None:
    nothing = RatioSums.from_logprobs(torch.ones(1, 2), torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.bool))
    assert nothing.num_tokens == 0
    with pytest.raises(ValueError, match="0 tokens"):
        nothing.statistics()


log_ratio_lists = st.lists(st.floats(-30, 30), min_size=1, max_size=40)


def test_token_ess_by_hand() -> None:
    # ratios 1, 1, 4: S1 = 6, S2 = 18, N = 3: 36 / 54 = 2/3
    assert token_ess(torch.tensor([0.0, 0.0, math.log(4.0)])) == pytest.approx(2 / 3, rel=1e-6)


@pytest.mark.parametrize("spread", [0.05, 0.1, 0.2, 0.5])
def test_lognormal_law(spread: float) -> None:
    log_ratios = spread * torch.randn(400_000, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    assert token_ess(log_ratios) == pytest.approx(math.exp(-(spread**2)), abs=0.005)


@given(log_ratio_lists)
def test_bounds(log_ratios: list[float]) -> None:
    assert 1 / len(log_ratios) <= token_ess(torch.tensor(log_ratios, dtype=torch.float64)) <= 1.0


def test_lower_bound_holds_when_every_ratio_vanishes() -> None:
    # S2 = 2e-20 is far below the epsilon 1e-8; the plain formula would give about 2e-12.
    assert token_ess(torch.log(torch.tensor([1e-10, 1e-10], dtype=torch.float64))) == 0.5


@pytest.mark.parametrize(("sum_ratio", "sum_squared"), [(math.inf, 1.0), (1.0, math.inf), (math.nan, 1.0)])
def test_non_finite_sums_raise_instead_of_one(sum_ratio: float, sum_squared: float) -> None:
    with pytest.raises(FloatingPointError, match="expected finite"):
        ess_from_sums(sum_ratio, sum_squared, 3)


def test_sequence_ess_of_totals_by_hand() -> None:
    # Ratios e^900 and e^900 / 3, far beyond float64: (1 + 1/3)^2 / (2 (1 + 1/9)) = 4/5. A common factor cancels.
    totals = torch.tensor([900.0, 900.0 - math.log(3.0)], dtype=torch.float64)
    assert sequence_ess_of_totals(totals) == pytest.approx(0.8)
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(FloatingPointError, match="not finite"):
            sequence_ess_of_totals(torch.tensor([0.0, bad]))


@given(log_ratio_lists, st.floats(-500, 500))
def test_sequence_ess_bounds_and_scale(totals: list[float], shift: float) -> None:
    """In [1/n, 1] up to rounding, whatever factor all ratios share."""
    values = torch.tensor(totals, dtype=torch.float64)
    ess = sequence_ess_of_totals(values)
    assert 1 / len(totals) * (1 - 1e-9) <= ess <= 1.0
    assert sequence_ess_of_totals(values + shift) == pytest.approx(ess, rel=1e-9)


ENGINE = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64)
OLD = torch.tensor([0.4, 0.2, 0.1, 0.3], dtype=torch.float64)
LEARNER = torch.tensor([0.2, 0.3, 0.1, 0.4], dtype=torch.float64)


def test_the_ess_of_staleness_is_that_under_the_old_policy() -> None:
    """Tokens in the engine's exact shares: 1 / mean of (pi / pi_old)^2 over pi_old, by enumeration."""
    counts = (20 * ENGINE).long()
    mismatch, staleness = (each.repeat_interleave(counts) for each in ((OLD / ENGINE).log(), (LEARNER / OLD).log()))
    exact = 1.0 / float((LEARNER.square() / OLD).sum())
    assert staleness_ess(mismatch, staleness) == pytest.approx(exact, rel=1e-12)
    # What the plain ESS of pi / pi_old makes of the same tokens is another number.
    assert token_ess(staleness) == pytest.approx(0.8127, abs=1e-4)
    assert exact == pytest.approx(0.845, abs=1e-3)


@given(log_ratio_lists)
def test_without_mismatch_the_ess_of_staleness_is_the_plain_one(log_ratios: list[float]) -> None:
    staleness = torch.tensor(log_ratios, dtype=torch.float64)
    # In logarithms, hence without the epsilon.
    assert staleness_ess(torch.zeros_like(staleness), staleness) == pytest.approx(sequence_ess_of_totals(staleness))


def test_the_ess_of_staleness_refuses_what_is_not_finite() -> None:
    zeros = torch.zeros(2, dtype=torch.float64)
    for broken in (math.nan, math.inf, -math.inf):
        with pytest.raises(FloatingPointError, match="the ESS of the staleness is"):
            staleness_ess(zeros, torch.full((2,), broken, dtype=torch.float64))
    with pytest.raises(ValueError, match="the ESS of 0 tokens"):
        staleness_ess(zeros[:0], zeros[:0])


Estimator = Callable[[Tensor], Tensor]
ROLLOUT = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05], dtype=torch.float64)
SHIFT = torch.tensor([-0.9, 0.4, 1.1, -0.2, 0.6], dtype=torch.float64)
LOGITS = ROLLOUT.log() + SHIFT


def uncapped(log_ratios: Tensor) -> Tensor:
    return importance_kl(log_ratios, cap=math.inf)


def capped(log_ratios: Tensor) -> Tensor:
    return importance_kl(log_ratios, cap=0.5)


def expectation(estimator: Estimator, logits: Tensor, *, under: Tensor) -> tuple[float, Tensor]:
    """Exact mean of K over samples from `under`, and the mean of its gradient in the learner's logits."""
    leaf = logits.clone().requires_grad_()
    # The weights are those of the sampling law, which no estimator sees: held still.
    mean = (under.detach() * estimator(leaf.log_softmax(0) - ROLLOUT.log())).sum()
    mean.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return mean.item(), leaf.grad


def exact(divergence: Callable[[Tensor], Tensor], logits: Tensor) -> tuple[float, Tensor]:
    """A divergence between the learner softmax(logits) and ROLLOUT, by enumeration, and its gradient."""
    leaf = logits.clone().requires_grad_()
    value = divergence(leaf.softmax(0))
    value.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return value.item(), leaf.grad


def reverse_kl(learner: Tensor) -> Tensor:
    """KL(pi || pi_b), the anchor that P3O's paper writes."""
    return (learner * (learner / ROLLOUT).log()).sum()


def test_official_is_unbiased_for_samples_from_the_learner() -> None:
    value, _ = expectation(official_kl, LOGITS, under=LOGITS.softmax(0))
    assert value == pytest.approx(exact(reverse_kl, LOGITS)[0], rel=1e-12)


def test_importance_is_unbiased_in_value_and_uncapped_also_in_gradient() -> None:
    value, gradient = expectation(uncapped, LOGITS, under=ROLLOUT)
    wanted, wanted_gradient = exact(reverse_kl, LOGITS)
    assert value == pytest.approx(wanted, rel=1e-12)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-12, atol=1e-14)


def test_the_cap_of_importance_changes_the_gradient_only() -> None:
    value, gradient = expectation(capped, LOGITS, under=ROLLOUT)
    wanted, wanted_gradient = exact(reverse_kl, LOGITS)
    assert value == pytest.approx(wanted, rel=1e-12)
    assert gradient.norm() < wanted_gradient.norm()
    assert torch.cosine_similarity(gradient, wanted_gradient, dim=0) > 0.8


def gradient_at(estimator: Estimator, log_ratio: float) -> tuple[float, float]:
    leaf = torch.tensor(log_ratio, dtype=torch.float64, requires_grad=True)
    value = estimator(leaf)
    value.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return value.item(), leaf.grad.item()


def test_by_hand() -> None:
    # l = -ln 2: official -ln 2 + 2 - 1, slope 1 - 2. importance: -ln 2 / 2 - 1/2 + 1, slope -ln 2 / 2.
    assert gradient_at(official_kl, -math.log(2)) == pytest.approx((1 - math.log(2), -1.0), rel=1e-12)
    assert gradient_at(uncapped, -math.log(2)) == pytest.approx((0.5 - math.log(2) / 2, -math.log(2) / 2), rel=1e-12)
    # l = ln 3, cap .5: value 3 ln 3 - 2, slope .5 ln 3.
    assert gradient_at(capped, math.log(3)) == pytest.approx((3 * math.log(3) - 2, math.log(3) / 2), rel=1e-12)


def test_beyond_the_exponents_clip_a_vanishing_token_is_still_pulled_back() -> None:
    # l = -12: K = -12 + e^10 - 1; the slope stays 1 - e^10, where autograd of the clipped form says +1.
    assert gradient_at(official_kl, -12.0) == pytest.approx((-13 + math.exp(10), 1 - math.exp(10)), rel=1e-12)
    # l = 12: K = 12 + e^-10 - 1, slope 1 - e^-10.
    assert gradient_at(official_kl, 12.0) == pytest.approx((11 + math.exp(-10), 1 - math.exp(-10)), rel=1e-12)


@given(st.floats(-9.5, 9.5))
def test_slopes_are_the_derivatives(log_ratio: float) -> None:
    step = 1e-5
    for estimator in (official_kl, uncapped):
        _, slope = gradient_at(estimator, log_ratio)
        rise = gradient_at(estimator, log_ratio + step)[0] - gradient_at(estimator, log_ratio - step)[0]
        assert slope == pytest.approx(rise / (2 * step), rel=1e-5, abs=1e-6)


@given(st.floats(-9.5, 30.0))
def test_neither_is_ever_negative_and_both_are_zero_in_agreement(log_ratio: float) -> None:
    for estimator in (official_kl, uncapped):
        assert gradient_at(estimator, log_ratio)[0] >= 0.0
        assert gradient_at(estimator, 0.0) == (0.0, 0.0)


def test_small_mismatch_keeps_its_digits_in_float32() -> None:
    # K is l^2 / 2 to first order for both: 5e-9 at l = 1e-4, far below float32's resolution around 1.
    log_ratio = torch.tensor(1e-4)
    for estimator in (official_kl, uncapped):
        assert float(estimator(log_ratio)) == pytest.approx(5e-9, rel=0.01)
