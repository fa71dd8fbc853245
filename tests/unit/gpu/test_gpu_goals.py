"""Goals, verdicts and the machine's description of the GPU checks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.gpu.goals import Figure, Goal, Verdict

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("bounds", "value", "verdict"),
    [
        (dict(at_most=1.5), 1.5, "met"),
        (dict(at_most=1.5), 1.51, "missed"),
        (dict(at_least=0.45), 0.45, "met"),
        (dict(at_least=0.45), 0.44, "missed"),
        (dict(below=1e-3), 1e-3, "missed"),
        (dict(below=1e-3), 9e-4, "met"),
        (dict(at_least=0.02, at_most=0.04), 0.03, "met"),
        (dict(at_least=0.02, at_most=0.04), 0.01, "missed"),
        (dict(at_most=0.0), 0.0, "met"),
        (dict(at_most=1.5), math.nan, "missed"),
        (dict(at_least=1.5), math.nan, "missed"),
        (dict(below=1.5), math.nan, "missed"),
        (dict(at_most=1.5), math.inf, "missed"),
        ({}, 3.0, "shown"),
        ({}, [1.0, 2.0], "shown"),
        ({}, "9.0", "shown"),
        (dict(at_most=1.5), "no kernel", "not measured"),
    ],
)
def test_a_bound_is_judged(bounds: dict[str, float], value: Figure, verdict: Verdict) -> None:
    assert Goal(figure="f", what="", **bounds).judge({"f": value})[0] == verdict
