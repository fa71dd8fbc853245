"""Wait for a stop signal, for another role's work, or through an outage of the shared file system."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pipeline.background import Patience, print_notice
from pipeline.config.recipe import Recipe
from pipeline.data.epochs import Epoch, epoch_folder, newest
from pipeline.data.membership import Member
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import DeadlineExceededError, RecipeError, StoppedError, StoreError

EPOCH_VARIABLE = "EVENKEEL_EPOCH"
"""Environment variable of a learner's ranks: the number of their learner's start."""
GRACE_VARIABLE = "EVENKEEL_GRACE_S"
"""Environment variable: seconds in which a role that was asked to end saves, or answers requests in flight."""
LOG_VARIABLE = "EVENKEEL_LOG"
"""Environment variable of a role that a supervisor starts: its log file, to which its children append too."""
BEGUN = "begun"
"""Name of the file that rank 0 makes beside the stop file when it begins to train."""
DEFAULT_GRACE_S, LONGEST_GRACE_S = 120.0, 86_400.0
POLL_S = 0.25
EPOCH_POLL_S = 2.0
FINISHED_POLL_S = 10.0
RECIPE_DEADLINE_S = 600.0
"""Longest wait for the learner to begin a run, whose deadlines are unknown until then."""
LONGEST_S = 300.0
"""Longest outage, from the first error to the error that is raised."""
QUIET_S = 30.0
"""Time without an error that ends an outage; some looks are ten seconds apart."""
_SAID = (
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ECONNRESET, errno.ECONNREFUSED),
)
"""Errors of network file system clients whose server does not answer. Other errors are raised at once."""
T = TypeVar("T")


class Stop:
    """A flag that SIGTERM and Ctrl-C set once it is installed."""

    def __init__(self) -> None:
        self.asked = False

    def install(self) -> Stop:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(self, "asked", True))
        return self

    def check(self) -> None:
        """Raise StoppedError if this process was asked to end."""
        if self.asked:
            raise StoppedError("asked to end before the run was finished; started again, it goes on")


@dataclass
class Throttle:
    """A limiter for looks at a shared file system: calls return True at most once in `every_s` seconds."""

    every_s: float
    last: float = 0.0

    def __call__(self) -> bool:
        now = time.monotonic()
        due = now - self.last >= self.every_s
        if due:
            self.last = now
        return due


class Outage:
    """Tolerance for a shared file system that does not answer for a while. It covers only reads that are repeated: a
    failed look must not end healthy work. Writes raise as usual."""

    def __init__(self, who: str, longest_s: float = LONGEST_S) -> None:
        self._longest_s = longest_s
        self._patience = Patience(print_notice, who, "the server of that file system, or its mount")
        self._began: float | None = None
        self._newest = 0.0

    def tolerate(self, look: Callable[[], T], otherwise: T) -> T:
        """Return `look()`, or `otherwise` during an outage of at most `longest_s`. Raises other errors at once."""
        now = time.monotonic()
        if self._began is not None and now - self._newest > QUIET_S:
            self._began = None
            self._patience.progress()
        try:
            return look()
        except (OSError, DeadlineExceededError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if not isinstance(cause, OSError) or cause.errno not in _SAID:
                raise
            self._began, self._newest = self._began or now, time.monotonic()
            if self._newest - self._began > self._longest_s:
                raise
            self._patience.still(f"the file system of the run ({cause})")
            return otherwise


def wait_for(stop: Stop, found: Callable[[], T | None], what: str, deadline_s: float) -> T:
    """Return the first result of `found` that is not None. Raises DeadlineExceededError, or StoppedError."""
    ends, told = time.monotonic() + deadline_s, False
    patience = Patience(print_notice, "this role", "the role that makes it (logs in RUN/logs)")
    while True:
        stop.check()
        if (result := found()) is not None:
            patience.progress()
            return result
        if time.monotonic() > ends:
            raise DeadlineExceededError(
                f"waited {deadline_s:g} s for {what}; see whether the process that makes it is running"
            )
        if not told:
            print(f"waiting for {what}", flush=True)
            told = True
        patience.still(what)
        time.sleep(POLL_S)


def wait_for_policy(run: RunDirectory, recipe: Recipe, stop: Stop) -> None:
    deadline_s = recipe.rollout.start_deadline_s
    wait_for(stop, lambda: run.is_published() or None, f"a published policy in {run.policies}", deadline_s)


def wait_for_engines(run: RunDirectory, recipe: Recipe, stop: Stop, count: int) -> None:
    wait_for(
        stop,
        lambda: len(announced(run, recipe)) >= count or None,
        f"{count} of {recipe.rollout.engines} engines to announce themselves in {run.path}/engines",
        recipe.rollout.start_deadline_s,
    )


def announced(run: RunDirectory, recipe: Recipe) -> list[Member]:
    """Return the engines that are up as far as is known: announced by their newest start, or named in the recipe."""
    found = run.membership(recipe.rollout.urls).engines()
    if recipe.rollout.urls:
        return list(found)
    return [one for one in found if one.started == newest(epoch_folder(run.path, "engine", one.index))]


def rank_epoch(run: Path) -> Epoch:
    """Return the learner's epoch that the agent gave this rank. Raises StoreError without an agent."""
    number = os.environ.get(EPOCH_VARIABLE)
    if number is None:
        raise StoreError(
            f"{EPOCH_VARIABLE} is not set: this rank was not started by `evenkeel role learner`; start it by that"
        )
    return Epoch(epoch_folder(run, "learner"), int(number))


def grace_s() -> float:
    """Return the seconds of EVENKEEL_GRACE_S. Raises RecipeError for an invalid value."""
    said = os.environ.get(GRACE_VARIABLE) or str(DEFAULT_GRACE_S)
    with suppress(ValueError):
        if 0 <= (seconds := float(said)) <= LONGEST_GRACE_S:
            return seconds
    raise RecipeError(f"{GRACE_VARIABLE} is {said!r}, expected seconds from 0 to {LONGEST_GRACE_S:g}; correct it")


def log_file() -> Path | None:
    named = os.environ.get(LOG_VARIABLE)
    return Path(named) if named else None
