"""Broken versions of the product are caught; the list of them fits the product as it is."""

from __future__ import annotations

import pytest

from tests.chaos.checker import cases
from tests.chaos.checker.breakages import BREAKAGES
from tests.chaos.checker.hunt import hunt
from tests.mutations import check

QUICK = (
    "a resumed learner leaves out a step",
    "every version may be in every batch",
    "a group that does not fit vanishes",
)
"""Those that few seeds show."""


def test_every_breakage_can_be_applied() -> None:
    check(BREAKAGES)
    assert len(BREAKAGES) >= 20
    assert len({case.id for case in cases()}) == len(BREAKAGES)


@pytest.mark.parametrize("what", QUICK)
def test_a_broken_version_is_caught(what: str) -> None:
    [mutation] = [mutation for mutation in BREAKAGES if mutation.what == what]
    caught = hunt(mutation, most_seeds=30)
    assert caught is not None, "no seed shows it"
    assert caught.verdict
