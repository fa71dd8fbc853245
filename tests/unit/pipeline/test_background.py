"""What takes rank 0 long keeps no rank waiting in one collective."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pytest

from pipeline import background
from pipeline.background import (
    SWITCH_S,
    DiagnosticsWriter,
    Patience,
    beside_loop,
    notice_line,
    spare_collections,
    tell_when_done,
)
from pipeline.errors import CorruptCheckpointError
from tests.support.one_rank import OneRank

T = TypeVar("T")


class Counting(OneRank):
    def __init__(self) -> None:
        self.longest_s = 0.0
        self.told = 0

    def tell(self, action: Callable[[], T]) -> T:
        began = time.monotonic()
        try:
            return super().tell(action)
        finally:
            self.told += 1
            self.longest_s = max(self.longest_s, time.monotonic() - began)


def test_a_long_action_is_told_in_short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "ANSWER_S", 0.05)
    learner = Counting()

    def action() -> int:
        time.sleep(0.6)
        return 7

    assert tell_when_done(learner, action) == 7
    assert learner.told > 2


@pytest.mark.parametrize("error", [CorruptCheckpointError("flipped"), TimeoutError("its own")])
def test_what_it_raises_is_raised(error: Exception) -> None:
    def action() -> None:
        raise error

    with pytest.raises(type(error), match=str(error)):
        tell_when_done(OneRank(), action)


def test_diagnostics_are_written_in_order_beside_the_caller() -> None:
    writer, goes_on, written = DiagnosticsWriter(most_waiting=4), threading.Event(), list[int]()
    writer.put(lambda: written.append(int(goes_on.wait(20.0))), "step 1")
    for number in (2, 3):
        writer.put(partial(written.append, number), f"step {number}")
    assert written == [], "the caller has not waited"
    goes_on.set()
    writer.flush()
    assert written == [1, 2, 3]
    writer.close()


def test_no_more_diagnostics_wait_in_memory_than_may() -> None:
    writer, goes_on, put = DiagnosticsWriter(most_waiting=1), threading.Event(), list[int]()

    def fill() -> None:
        for number in range(4):
            writer.put(goes_on.wait, "")  # type: ignore[arg-type]
            put.append(number)

    filling = threading.Thread(target=fill)
    filling.start()
    filling.join(0.3)
    assert put == [0], "it is under way, and none may wait beside it"
    goes_on.set()
    filling.join(20.0)
    writer.close()
    assert put == [0, 1, 2, 3]


def test_a_disk_that_hangs_holds_up_nobody_for_longer_than_the_deadline(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(background, "WRITE_DEADLINE_S", 0.2)
    writer, goes_on, written = DiagnosticsWriter(most_waiting=2), threading.Event(), list[int]()
    writer.put(lambda: written.append(int(goes_on.wait(20.0))), "step 1")
    for step in (2, 3):
        writer.put(partial(written.append, step), f"step {step}")
    writer.close()
    goes_on.set()
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" took over 0.2 s ")[0] for line in said] == [
        "warning: diagnostics of step 3",
        "warning: diagnostics of step 1, step 2",
    ]


def test_all_work_is_done_by_one_thread_that_is_asked_for_the_lock_often() -> None:
    async def many() -> list[int]:
        return await asyncio.gather(*(beside_loop(threading.get_ident) for _ in range(20)))

    first, second = asyncio.run(many()), asyncio.run(many())
    assert len({*first, *second}) == 1, "also of loops that come one after the other"
    assert threading.get_ident() not in first
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    assert SWITCH_S < 0.005


def test_what_is_there_is_left_out_of_later_collections() -> None:
    there = [[] for _ in range(1000)]
    spare_collections()
    try:
        looked_at = {id(each) for each in gc.get_objects()}
        new = [[] for _ in range(1000)]
        assert not looked_at & {id(each) for each in there}
        assert {id(each) for each in gc.get_objects()} >= {id(each) for each in new}
    finally:
        gc.unfreeze()


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
