"""Bounds of the numbers that a user gives to a plan.

A plan multiplies and divides by them: an infinite one, or one next to nothing, would end it amid its arithmetic.
"""

from __future__ import annotations

from pipeline.errors import RecipeError

LEAST, MOST = 1e-6, 1e9
"""Wider than anything that a machine or a run could have."""


def check_given(option: str, value: float) -> None:
    """Raises RecipeError for a number outside the bounds, or for none (NaN)."""
    if not LEAST <= value <= MOST:
        raise RecipeError(f"{option} is {value}, expected a number from {LEAST:g} to {MOST:g}; say what there is")
