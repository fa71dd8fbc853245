"""Every second belongs to one phase."""

from __future__ import annotations

from collections.abc import Iterator

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


def test_a_phase_inside_another_keeps_its_own_time(clock: list[float]) -> None:
    def gathered() -> Iterator[int]:
        for item in range(3):
            clock[0] += 2.0
            yield item

    watch = Stopwatch(("gather", "quantize", "send"))

    def quantized(stream: Iterator[int]) -> Iterator[int]:
        for item in stream:
            clock[0] += 5.0
            yield item

    found = []
    for item in watch.timed("quantize", quantized(watch.timed("gather", gathered()))):
        clock[0] += 100.0  # the consumer's own time
        found.append(item)
    assert found == [0, 1, 2]
    assert watch.seconds == {"gather": 6.0, "quantize": 15.0, "send": 0.0}
    assert watch.total_s == 321.0
