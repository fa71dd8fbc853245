"""Record when each process of a run did what, for `evenkeel trace`, and measure the seconds of a step's phases.

    RUN/spans/learner-000002.rank-0003.jsonl          the newest spans of this process, one per line
    RUN/spans/learner-000002.rank-0003.older.jsonl    the spans before

    with spans.recorded(run, "collector-000003"):      once per process; without it, no span is kept
        with spans.span("engine 0/requests", "request", samples=8):
            …

A span lies on a lane, a row of the trace. A lane with a slash belongs to the part of the run named before the slash. A
thread writes the lines up to a second later, which a killed process loses. A full disk costs spans, nothing else. A
file has at most MAX_BYTES, and only the newest STARTS starts of a role are kept.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from pipeline.data.event_log import read_lines
from pipeline.data.files import make_folder

MAX_BYTES = 8 << 20
STARTS = 4
FLUSH_S = 1.0
FOLDER = "spans"
_OLDER = ".older"
_MOST_WAITING = 100_000
"""The most spans in memory while the disk takes none."""

_recorder: _Recorder | None = None


def note(lane: str, name: str, began: float, ended: float, **facts: Any) -> None:
    """Record a finished span; `began` and `ended` are from time.monotonic. Thread-safe."""
    if (recorder := _recorder) is not None:
        start, end = round(recorder.since_1970 + began, 6), round(recorder.since_1970 + ended, 6)
        recorder.waiting.append({"lane": lane, "name": name, "start": start, "seconds": round(end - start, 6), **facts})


@contextmanager
def span(lane: str, name: str, **facts: Any) -> Iterator[None]:
    """Record the time of the `with` block, however it ends."""
    began = time.monotonic()
    try:
        yield
    finally:
        note(lane, name, began, time.monotonic(), **facts)


@contextmanager
def recorded(run: Path, source: str) -> Iterator[None]:
    """Keep this process's spans of the block, in files named by `source`: Epoch.name, and the rank."""
    global _recorder
    before, recorder = _recorder, _Recorder(run / FOLDER, source)
    _recorder = recorder
    try:
        yield
    finally:
        _recorder = before
        recorder.close()


def read_spans(
    run: Path, damage: list[str] | None = None, begin: float = -math.inf, end: float = math.inf
) -> dict[str, list[dict[str, Any]]]:
    """Return each source's lines that overlap `begin` to `end`, in seconds since 1970; `damage` as in `read_lines`."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((run / FOLDER).glob("*.jsonl")):
        lines = found.setdefault(path.stem.removesuffix(_OLDER), [])
        for line in read_lines(path, "spans", damage):
            if line["seconds"] >= 0.0 and line["start"] < end and line["start"] + line["seconds"] > begin:
                lines.append(line)
    return found


class _Recorder:
    def __init__(self, folder: Path, source: str) -> None:
        self._path = folder / f"{source}.jsonl"
        self.waiting: deque[dict[str, Any]] = deque(maxlen=_MOST_WAITING)
        self.since_1970 = time.time() - time.monotonic()
        """Fixed at the start, so that spans keep their distances when the wall clock is adjusted."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write_now_and_then, name="spans", daemon=True)
        with suppress(OSError):
            make_folder(folder)
            # Delete older starts of this process. `source` is ROLE-NUMBER, or ROLE-NUMBER.rank-NUMBER.
            start, dot, rank = source.partition(".")
            role = start.rpartition("-")[0]
            for ending in ("", _OLDER):
                for path in sorted(folder.glob(f"{role}-[0-9]*[0-9]{dot}{rank}{ending}.jsonl"))[: 1 - STARTS]:
                    path.unlink(missing_ok=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _write_now_and_then(self) -> None:
        while not self._ended.wait(FLUSH_S):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        texts = []
        with suppress(IndexError):
            while True:
                texts.append(json.dumps(self.waiting.popleft()) + "\n")
        if not texts:
            return
        data = "".join(texts).encode()
        with suppress(OSError):
            before = self._path.stat().st_size if self._path.exists() else 0
            if before and before + len(data) > MAX_BYTES:
                os.replace(self._path, self._path.with_name(f"{self._path.stem}{_OLDER}.jsonl"))
                before = 0
            try:
                with self._path.open("ab") as file:
                    file.write(data)
            except OSError:
                os.truncate(self._path, before)  # half a line would spoil the next
                raise


T = TypeVar("T")


class Stopwatch:
    """A stopwatch that sums `seconds` by phase; phases are blocks of code, or consecutive laps."""

    def __init__(self, phases: Iterable[str] = (), *, lane: str | None = None, **facts: Any) -> None:
        """Start now, with the `phases` at 0. With a `lane`, phases are also recorded there as spans, with `facts`."""
        self._lane, self._facts = lane, facts
        self.seconds = dict.fromkeys(phases, 0.0)
        self._started = self._mark = time.monotonic()
        self._inner = 0.0

    @property
    def total_s(self) -> float:
        return time.monotonic() - self._started

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the `with` block for `name`, except for inner phases, which count separately."""
        before, started = self._inner, time.monotonic()
        yield
        ended = time.monotonic()
        spent = ended - started
        self._add(name, started, ended, spent - (self._inner - before))
        self._inner = before + spent

    def timed(self, name: str, stream: Iterable[T]) -> Iterator[T]:
        """Yield the stream's items, and count the time to produce them for `name`."""
        items, end = iter(stream), object()
        while True:
            with self.phase(name):
                item = next(items, end)
            if item is end:
                return
            yield item  # type: ignore[misc]

    def lap(self, name: str) -> None:
        """Count the time since the last lap (or the start) for `name`."""
        now = time.monotonic()
        self._add(name, self._mark, now, now - self._mark)
        self._mark = now

    def _add(self, name: str, began: float, ended: float, spent: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + spent
        if self._lane is not None:
            note(self._lane, name.removesuffix("_s"), began, ended, **self._facts)
