from __future__ import annotations

import math

import pytest
import torch

from precision.mismatch.statistics import Gap, gap


def test_gap_by_hand() -> None:
    # l = 0, ln 2, -ln 2 (and NaN behind the mask): rho = 1, 2, .5; S1 = 3.5, S2 = 5.25
    learner = torch.tensor([-1.0, -2.0 + math.log(2), -3.0 - math.log(2), math.nan], dtype=torch.float64)
    engine = torch.tensor([-1.0, -2.0, -3.0, -1.0], dtype=torch.float64)
    result = gap(learner, engine, torch.tensor([True, True, True, False]))
    assert result.num_tokens == 3
    assert result.max_abs == pytest.approx(math.log(2), rel=1e-12)
    assert result.mean_abs == pytest.approx(2 * math.log(2) / 3, rel=1e-12)
    assert result.k3 == pytest.approx(0.5 / 3, rel=1e-12)
    assert result.ess == pytest.approx(12.25 / 15.75, rel=1e-8)


def test_max_abs_sees_both_signs() -> None:
    zeros = torch.zeros(2)
    assert gap(torch.tensor([-3.0, 1.0]), zeros).max_abs == 3.0
    assert gap(torch.tensor([-1.0, 3.0]), zeros).max_abs == 3.0


def test_agreement() -> None:
    row = torch.tensor([-0.1, -7.0])
    assert gap(row, row.clone()) == Gap(num_tokens=2, max_abs=0.0, mean_abs=0.0, k3=0.0, ess=pytest.approx(1.0))


def test_nothing_or_nan_compared_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 tokens"):
        gap(torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.bool))
    with pytest.raises(FloatingPointError):
        gap(torch.tensor([math.nan]), torch.zeros(1))
