"""Every second belongs to one phase."""

from __future__ import annotations

import pytest

from pipeline import stopwatch
from pipeline.stopwatch import Stopwatch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time is the only entry."""
    now = [100.0]
    monkeypatch.setattr(stopwatch.time, "monotonic", lambda: now[0])
    return now


def test_laps_follow_one_another(clock: list[float]) -> None:
    watch = Stopwatch()
    for name, seconds in (("lock", 1.0), ("load", 4.0), ("lock", 2.0)):
        clock[0] += seconds
        watch.lap(name)
    assert watch.seconds == {"lock": 3.0, "load": 4.0}


def test_phases_leave_out_what_lies_between_them(clock: list[float]) -> None:
    watch = Stopwatch()
    for _ in range(2):
        with watch.phase("update"):
            clock[0] += 3.0
        clock[0] += 10.0
    assert watch.seconds == {"update": 6.0}
