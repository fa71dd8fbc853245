"""ESS: hand-computed values, bounds, the lognormal law, and no silent fallback."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from precision.ess import ess_from_sums, sequence_ess_of_totals, staleness_ess, token_ess

log_ratio_lists = st.lists(st.floats(-30, 30), min_size=1, max_size=40)


def test_token_ess_by_hand() -> None:
    # ratios 1, 1, 4: S1 = 6, S2 = 18, N = 3: 36 / 54 = 2/3
    assert token_ess(torch.tensor([0.0, 0.0, math.log(4.0)])) == pytest.approx(2 / 3, rel=1e-6)


def test_one_huge_ratio_leaves_one_token() -> None:
    assert token_ess(torch.tensor([30.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25, rel=1e-6)


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


def test_no_tokens_raise() -> None:
    with pytest.raises(ValueError, match="0 tokens"):
        ess_from_sums(0.0, 0.0, 0)


def test_sequence_ess_refuses_empty() -> None:
    with pytest.raises(ValueError, match="0 sequences"):
        sequence_ess_of_totals(torch.zeros(0))


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
