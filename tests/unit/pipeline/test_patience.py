"""A wait says so, ever more rarely, and only when it is longer than usual."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pipeline import patience
from pipeline.patience import Patience, notice_line, retry_pause_s


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def told(said: list[dict[str, Any]]) -> list[tuple[float, bool]]:
    return [(notice["seconds"], notice["over"]) for notice in said]


def waits(subject: Patience, clock: Clock, seconds: int) -> None:
    for _ in range(seconds):
        subject.still("batch 3")
        clock.now += 1.0


def test_a_long_wait_is_told_ever_more_rarely_and_its_end_too(clock: Clock) -> None:
    said: list[dict[str, Any]] = []
    subject = Patience(lambda **notice: said.append(notice), "the learner", "a commit")
    waits(subject, clock, 600)
    subject.progress()
    assert told(said) == [(60.0, False), (120.0, False), (240.0, False), (480.0, False), (600.0, True)]
    assert notice_line(said[0]) == (
        "no progress for 60 s: the learner waits for batch 3; what would end the wait: a commit"
    )
    assert notice_line(said[-1]) == "the learner goes on after 600 s"


def test_a_short_wait_is_not_told(clock: Clock) -> None:
    said: list[dict[str, Any]] = []
    subject = Patience(lambda **notice: said.append(notice), "the learner", "a commit")
    for _ in range(5):
        waits(subject, clock, 50)
        subject.progress()
        clock.now += 1000.0  # at work: nobody waits
    assert said == []


def test_where_waits_are_long_a_usual_one_is_not_told(clock: Clock) -> None:
    said: list[dict[str, Any]] = []
    subject = Patience(lambda **notice: said.append(notice), "the collector", "a publish")
    waits(subject, clock, 100)
    subject.progress()
    assert told(said) == [(60.0, False), (100.0, True)]
    said.clear()
    waits(subject, clock, 150)
    subject.progress()
    assert said == []
    waits(subject, clock, 301)
    assert told(said) == [(300.0, False)]


def test_pauses_between_failures_double_up_to_some_seconds() -> None:
    pauses = [retry_pause_s(0.2, failures) for failures in range(1, 1000)]
    assert pauses[:4] == [0.2, 0.4, 0.8, 1.6]
    assert max(pauses) == patience._SLOWEST_RETRY_S
