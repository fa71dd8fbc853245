"""A shared file system that answers with errors for a while, as when its server is started again or another takes over.

Who only looks at it, again and again, goes on meanwhile: healthy work is not ended because of a look. What is written
is not asked here.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

from pipeline.errors import DeadlineExceededError
from pipeline.patience import Patience, print_notice

LONGEST_S = 300.0
"""From the first error to the one that is raised."""
QUIET_S = 30.0
"""Without an error for so long, an outage is over: some looks come every ten seconds."""
_SAID = (
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ECONNRESET, errno.ECONNREFUSED),
)
"""What clients of network file systems answer while their server does not. Other errors stay as they are."""
T = TypeVar("T")


class Outage:
    """Of the file system that one process looks at."""

    def __init__(self, who: str, longest_s: float = LONGEST_S) -> None:
        self._longest_s = longest_s
        self._patience = Patience(print_notice, who, "the server of that file system, or its mount")
        self._began: float | None = None
        self._newest = 0.0

    def bridged(self, look: Callable[[], T], otherwise: T) -> T:
        """What `look` returns; `otherwise` while the file system does not answer, for LONGEST_S at most. Raises what
        `look` raises beside that."""
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
