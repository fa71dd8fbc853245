"""Where the seconds went, by phase."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pipeline import spans

T = TypeVar("T")


class Stopwatch:
    """`seconds` by name of a phase. Phases are measured as blocks of code, or as laps that follow one another."""

    def __init__(self, phases: Iterable[str] = (), *, lane: str | None = None, **facts: Any) -> None:
        """Starts now. `phases` are in `seconds` from the beginning, with 0. With a `lane`, blocks and laps are also
        noted there (pipeline.spans), with these `facts`."""
        self._lane, self._facts = lane, facts
        self.seconds = dict.fromkeys(phases, 0.0)
        self._started = self._mark = time.monotonic()
        self._inner = 0.0

    @property
    def total_s(self) -> float:
        """Seconds since the stopwatch was made."""
        return time.monotonic() - self._started

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The time of the `with` block belongs to `name`, but for the phases inside it, which keep their own."""
        before, started = self._inner, time.monotonic()
        yield
        ended = time.monotonic()
        spent = ended - started
        self._add(name, spent - (self._inner - before))
        self._note(name, started, ended)
        self._inner = before + spent

    def timed(self, name: str, stream: Iterable[T]) -> Iterator[T]:
        """The same stream. The time that it takes to make its items belongs to `name`."""
        items, end = iter(stream), object()
        while True:
            with self.phase(name):
                item = next(items, end)
            if item is end:
                return
            yield item  # type: ignore[misc]

    def lap(self, name: str) -> None:
        """The time since the last lap (or since the stopwatch was made) belongs to `name`."""
        now = time.monotonic()
        self._add(name, now - self._mark)
        self._note(name, self._mark, now)
        self._mark = now

    def _add(self, name: str, spent: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def _note(self, name: str, began: float, ended: float) -> None:
        if self._lane is not None:
            spans.note(self._lane, name.removesuffix("_s"), began, ended, **self._facts)
