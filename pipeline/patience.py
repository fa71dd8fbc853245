"""A wait without progress says so: after a minute, and then ever more rarely.

    patience = Patience(say, "the collector", "the learner's publish")           one for each kind of wait of a loop
    while not there():
        patience.still("version 13 (published: 12)")      says now and then what is waited for, for how long, and what
        sleep(pause_s)                                     would end it
    patience.progress()

Every loop that waits or tries again has one. Where waits of a kind usually take longer, such as those for a step of a
large model, one is noticed when it takes twice as long as any before. A notice is for people, as events are: no process
decides anything by it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

FIRST_NOTICE_S = 60.0
RAREST_NOTICE_S = 1800.0
_SLOWEST_RETRY_S = 5.0

Say = Callable[..., None]
"""Called with who, waits_for, seconds, unblocked_by and over (whether the wait has ended)."""


def print_notice(**notice: Any) -> None:
    """A notice on stderr."""
    print(notice_line(notice), file=sys.stderr, flush=True)


def noted_in(event: Callable[..., None]) -> Say:
    """Prints each notice and writes it as an event; `event` is that of an EventLog."""

    def say(**notice: Any) -> None:
        print_notice(**notice)
        event("no_progress", **notice)

    return say


def notice_line(notice: dict[str, Any]) -> str:
    """A notice for people."""
    if notice["over"]:
        return f"{notice['who']} goes on after {notice['seconds']:.0f} s"
    return (
        f"no progress for {notice['seconds']:.0f} s: {notice['who']} waits for {notice['waits_for']}; "
        f"what would end the wait: {notice['unblocked_by']}"
    )


@dataclass
class Patience:
    """Of one kind of wait. Not for several threads."""

    say: Say
    who: str
    unblocked_by: str
    first_s: float = FIRST_NOTICE_S
    _since: float | None = field(init=False, default=None)
    """When the first look found no progress; None while there is no wait."""
    _longest_s: float = field(init=False, default=0.0)
    _due_s: float = field(init=False, default=0.0)
    _told: bool = field(init=False, default=False)

    def still(self, waits_for: str) -> None:
        """Call it at each look at which nothing has changed."""
        now = time.monotonic()
        if self._since is None:
            self._since, self._told = now, False
            self._due_s = max(self.first_s, 2.0 * self._longest_s)
        waited_s = now - self._since
        if waited_s >= self._due_s:
            self._tell(waits_for, waited_s, over=False)
            self._told, self._due_s = True, waited_s + min(waited_s, RAREST_NOTICE_S)

    def progress(self) -> None:
        """Call it when something has changed: the wait has ended."""
        if self._since is None:
            return
        waited_s, self._since = time.monotonic() - self._since, None
        self._longest_s = max(self._longest_s, waited_s)
        if self._told:
            self._tell("", waited_s, over=True)

    def _tell(self, waits_for: str, seconds: float, *, over: bool) -> None:
        self.say(who=self.who, waits_for=waits_for, seconds=seconds, unblocked_by=self.unblocked_by, over=over)


def retry_pause_s(first_s: float, failures: int) -> float:
    """The pause after so many failures in a row, 1 or more: it doubles, up to some seconds."""
    return min(first_s * 2.0 ** min(failures - 1, 16), _SLOWEST_RETRY_S)
