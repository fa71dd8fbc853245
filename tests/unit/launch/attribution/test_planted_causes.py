"""What counts as named, without engines: tests/integration/test_mismatch.py plants causes in real ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.planted_causes import PLANTS, is_named

LOST = next(plant for plant in PLANTS if plant.name == "a weight update that was lost")


def test_every_cause_has_the_term_in_which_it_shows() -> None:
    assert all(bool(plant.term) == bool(plant.cause) for plant in PLANTS)


@pytest.mark.parametrize(
    ("cause", "kernels", "named"), [("checksums", 0.17, True), ("checksums", 3e-8, False), ("audit", 0.17, False)]
)
def test_a_cause_is_named_when_it_shows_in_its_term_too(cause: str, kernels: float, named: bool) -> None:
    terms = dict(quantization=dict(mean_abs=0.036), kernels=dict(mean_abs=kernels))
    result: dict[str, Any] = dict(cause=dict(cause=cause, where=[]), terms=terms)
    assert is_named(LOST, result) == named
