"""Where the seconds went, by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """`seconds` by name of a phase. Phases are measured as blocks of code, or as laps that follow one another."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._mark = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The time of the `with` block belongs to `name`."""
        started = time.monotonic()
        yield
        self._add(name, time.monotonic() - started)

    def lap(self, name: str) -> None:
        """The time since the last lap (or since the stopwatch was made) belongs to `name`."""
        now = time.monotonic()
        self._add(name, now - self._mark)
        self._mark = now

    def _add(self, name: str, spent: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + spent
