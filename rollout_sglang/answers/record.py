"""How an engine's answers have been lately: one that answers badly is left out, until it is verified again.

A bad answer is one that cannot be, or an error of an engine that is well otherwise. It is thrown away and asked again
elsewhere, whoever sent it. One of them may be a flipped bit on its way, or the request's own; an engine of which it
comes again is at fault, though it answers every look and its weights are right. MOST_BAD among its last WINDOW answers
are counted, not those of some seconds: engines answer ten requests a second or one in ten minutes.

Verification can find nothing wrong with such an engine, so it comes back. Each time it is left out for twice as long:
what it costs the others falls to nothing. Its record is clean again after WINDOW good answers.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

WINDOW = 32
MOST_BAD = 3
"""A broken engine costs three requests. One that errs in one answer of a hundred stays: three among 32 happen to it in
0.4 % of windows."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0
DIRECT_S = 60.0
"""The router does not say which engine answered. For so long after a bad answer through it, engines are asked directly,
so that the one at fault is found."""


@dataclass
class AnswerRecord:
    """Of one engine."""

    last: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Whether each of the last answers was good."""
    times: int = 0
    """How often it was left out for its answers."""
    until: float = 0.0
    """When it may come back, by time.monotonic."""

    @property
    def may_return(self) -> bool:
        """Whether it may be verified and get requests again."""
        return time.monotonic() >= self.until

    def good(self) -> None:
        """It answered what was asked."""
        self.last.append(True)
        if self.times and len(self.last) == WINDOW and all(self.last):
            self.times = 0

    def bad(self) -> bool:
        """It answered badly. Returns whether it is to be left out now."""
        self.last.append(False)
        if self.last.count(False) < MOST_BAD:
            return False
        self.last.clear()
        self.until = time.monotonic() + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self.times)
        self.times += 1
        return True
