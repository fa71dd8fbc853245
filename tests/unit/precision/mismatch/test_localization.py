from __future__ import annotations

import pytest
import torch

from precision.mismatch.localization import suspects


def test_the_planted_fault_comes_first_with_its_amount() -> None:
    draw = torch.Generator().manual_seed(0)
    effects = {f"module {index}": torch.randn(400, generator=draw, dtype=torch.float64) for index in range(20)}
    noise = 0.3 * torch.randn(400, generator=draw, dtype=torch.float64)
    found = suspects(-2.5 * effects["module 7"] + noise, effects, {"module 7": -10.0})
    assert found[0].name == "module 7"
    assert found[0].amount == pytest.approx(-2.5, rel=0.05)
    assert found[0].explained == pytest.approx(2.5**2 / (2.5**2 + 0.3**2), abs=0.02)
    assert found[1].explained < 0.1


def test_the_opposite_of_a_fault_is_not_that_fault() -> None:
    """An engine with newer weights than the learner's does not hold older ones, and no scale is below 0."""
    effect = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    for amount, explained in ((-0.5, 1.0), (-1.0, 0.0), (-1.5, 0.0), (0.5, 1.0)):
        (found,) = suspects(amount * effect, {"it": effect}, {"it": -1.0})
        assert (found.explained, found.amount) == (pytest.approx(explained), pytest.approx(amount))
    assert suspects(-effect, {"it": effect})[0].explained == 0.0


def test_an_exact_multiple_is_explained_to_the_end() -> None:
    effect = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    (found,) = suspects(3 * effect, {"it": effect})
    assert (found.explained, found.amount) == (pytest.approx(1.0), pytest.approx(3.0))


def test_nothing_is_explained_by_nothing() -> None:
    some, none = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    assert suspects(some, {"none": none})[0].explained == 0.0
    assert suspects(none, {"some": some}, {"some": -1.0})[0].explained == 0.0
    assert suspects(some, {}) == []


def test_other_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="the effect of it"):
        suspects(torch.ones(3).double(), {"it": torch.ones(2).double()})
