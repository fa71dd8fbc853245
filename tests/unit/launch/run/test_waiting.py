"""A file system that does not answer for a while, as who looks at it again and again sees it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest

from launch.run import waiting as outage
from launch.run.waiting import LONGEST_S, QUIET_S, Outage
from pipeline.errors import DeadlineExceededError, StoreError, SupersededError


def failing(error: Exception, cause: Exception | None = None) -> Callable[[], str]:
    def look() -> str:
        raise error from cause

    return look


STALE = OSError(errno.ESTALE, os.strerror(errno.ESTALE))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(outage.time, "monotonic", lambda: now[0])
    return now


def test_a_look_that_fails_is_bridged_for_some_minutes(clock: list[float]) -> None:
    looks = Outage("a role")
    for _ in range(3):
        assert looks.tolerate(failing(STALE), "otherwise") == "otherwise"
        clock[0] += 10.0
    assert looks.tolerate(lambda: "seen", "otherwise") == "seen"
    clock[0] += LONGEST_S
    assert looks.tolerate(failing(STALE), "otherwise") == "otherwise", "an outage of its own: it was quiet between"
    clock[0] += QUIET_S - 1
    assert looks.tolerate(failing(DeadlineExceededError("NEWEST cannot be read"), STALE), "otherwise") == "otherwise"


def test_one_that_goes_on_is_raised(clock: list[float]) -> None:
    looks = Outage("a role")
    while clock[0] <= 1000.0 + LONGEST_S:
        assert looks.tolerate(failing(STALE), "otherwise") == "otherwise"
        clock[0] += 10.0
    with pytest.raises(OSError, match="Stale"):
        looks.tolerate(failing(STALE), "otherwise")


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(errno.EACCES, "Permission denied"),
        OSError(errno.ENOSPC, "No space left on device"),
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
        SupersededError("start 2 has taken over"),
        StoreError("damaged"),
        DeadlineExceededError("it is empty"),
    ],
)
def test_whatever_no_server_of_files_says_is_raised_at_once(error: Exception) -> None:
    with pytest.raises(type(error)):
        Outage("a role").tolerate(failing(error), None)
