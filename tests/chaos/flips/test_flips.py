"""The order of the flips. One of each kind is tried by tests/integration/test_loop.py, on the run that it has made."""

from __future__ import annotations

from tests.chaos.flips.flip import KINDS, flips


def test_ids_are_stable_and_kinds_take_turns() -> None:
    names = [case.id for case in flips(60)]
    assert len(set(names)) == 60
    assert names[:25] == [case.id for case in flips(25)]
    assert {name.split(" ", 1)[1] for name in names[: len(KINDS)]} == set(KINDS)
