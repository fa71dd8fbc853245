"""RatioSums: every statistic by hand, merging, masking, bins."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from precision.histogram import LOG_RATIO_EDGES, NUM_LOG_RATIO_BINS
from precision.ratios import MAX_LOG_RATIO, RatioSums, masked_log_ratios

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
    assert sums_of([1e-9]).k3_kl == pytest.approx(5e-19, rel=1e-3, abs=0.0)


def test_k3_estimates_kl_from_sampler_to_learner() -> None:
    rollout = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    learner = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    counts = torch.tensor([7, 2, 1])  # the exact rollout frequencies of ten tokens
    tokens = torch.repeat_interleave(torch.arange(3), counts)[None]
    sums = RatioSums.from_logprobs(learner.log()[tokens], rollout.log()[tokens], torch.ones_like(tokens).bool())
    forward = float((rollout * (rollout / learner).log()).sum())
    assert sums.k3_kl == pytest.approx(forward, rel=1e-9)
    assert sums.ratio_mean == pytest.approx(1.0, rel=1e-9)
    assert sums.chi2 == pytest.approx(float((learner**2 / rollout).sum()) - 1, rel=1e-9)


@given(st.lists(st.floats(-20, 20), min_size=2, max_size=30), st.data())
def test_merging_equals_the_whole(log_ratios: list[float], data: Any) -> None:
    cut = data.draw(st.integers(0, len(log_ratios)))
    whole = sums_of(log_ratios)
    parts = [sums_of(log_ratios[cut:]), sums_of(log_ratios[:cut])]
    torch.testing.assert_close(parts[0].sums + parts[1].sums, whole.sums, rtol=1e-12, atol=1e-9)
    assert torch.equal(torch.maximum(parts[0].maxima, parts[1].maxima), whole.maxima)
    assert torch.equal(parts[0].histogram + parts[1].histogram, whole.histogram)


def test_edges_are_symmetric_and_ascending() -> None:
    assert all(a < b for a, b in itertools.pairwise(LOG_RATIO_EDGES))
    assert [-edge for edge in reversed(LOG_RATIO_EDGES)] == list(LOG_RATIO_EDGES)
    assert len(LOG_RATIO_EDGES) + 1 == NUM_LOG_RATIO_BINS


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
    assert sums_of([-5000.0, 0.0]).min_ratio == 0.0


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        masked_log_ratios(torch.zeros(2, 3), torch.zeros(2, 1), torch.ones(2, 3, dtype=torch.bool))


def test_without_tokens_there_are_no_statistics() -> None:
    nothing = RatioSums.from_logprobs(torch.ones(1, 2), torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.bool))
    assert nothing.num_tokens == 0
    for name in ("ess", "chi2", "max_ratio"):
        with pytest.raises(ValueError, match="0 tokens"):
            getattr(nothing, name)
