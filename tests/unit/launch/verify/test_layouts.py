"""`evenkeel verify layouts`: what is compared, and what is judged of it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from launch.verify.layouts import QUANTITIES, compare, verify_layouts, worst_of
from pipeline.errors import RecipeError


def measured(**changes: list[float]) -> dict[str, NDArray[np.float64]]:
    return {name: np.array(changes.get(name, [1.0, 2.0, 4.0])) for name in QUANTITIES}


def test_the_reference_alone_is_refused_before_any_rank_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.verify.layouts.run_cases", lambda *_: pytest.fail("ranks ran"))
    with pytest.raises(RecipeError, match=r"^--layouts has nothing but one, which the others are compared with"):
        verify_layouts(["dense", "experts"], ["one"], 1e-5)


@pytest.mark.parametrize("name", QUANTITIES)
def test_what_is_not_finite_is_the_worst_wherever_it_stands(name: str) -> None:
    broken = compare(measured(), measured(**{name: [1.0, float("nan"), 4.0]}))
    sound = compare(measured(), measured(loss=[1.0, 2.0, 4.004]))
    assert worst_of(sound) == pytest.approx(1e-3)
    for rows in ([sound, broken], [broken, sound]):
        assert worst_of({str(number): worst_of(row) for number, row in enumerate(rows)}) == float("inf")


def test_equal_numbers_do_not_differ_also_where_they_are_zero() -> None:
    zeros = measured(loss=[0.0, 0.0, 4.0])
    assert worst_of(compare(zeros, zeros)) == 0.0
    assert worst_of(compare(zeros, measured(loss=[0.0, 1e-9, 4.0]))) == float("inf")
