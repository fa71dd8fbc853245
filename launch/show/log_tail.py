"""What was appended to a run's logs since one last looked, however much that is: a part of a file is held at a time."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeline.data.checksums import MAX_BYTES
from pipeline.data.event_log import log_files, parse_line

_PART_BYTES = 1 << 18
"""Read of a file before its lines are given on: a run has a file for every start of a role."""


@dataclass
class Tail:
    """Reads the complete lines that were appended to a JSON Lines file since the last call. Torn lines are skipped."""

    path: Path
    offset: int = 0
    _read: deque[dict[str, Any]] = field(default_factory=deque)
    """Lines that were read and not taken: the caller may be cut short, by a read of another file that fails."""

    def new_lines(self) -> Iterator[dict[str, Any]]:
        """New lines, oldest first; none while the file does not exist."""
        while True:
            while self._read:
                yield self._read[0]
                self._read.popleft()
            if not (part := self._next_part()):
                return
            self._read += (parsed for line in part if (parsed := parse_line(line)) is not None)

    def _next_part(self) -> list[bytes]:
        """Some complete lines; none at the end. What has no end within MAX_BYTES is taken for a damaged line."""
        part: list[bytes] = []
        if not self.path.is_file():
            return part
        ends = self.offset
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while ends - self.offset < _PART_BYTES:
                line = file.readline(MAX_BYTES)
                if not line.endswith(b"\n") and len(line) < MAX_BYTES:
                    break
                ends += len(line)
                part.append(line)
        self.offset = ends  # not before all was read: what a failed read took is read again
        return part


@dataclass
class LogTail:
    """Tails of all files of one log: every start of a role has its own."""

    run: Path
    log: Literal["metrics", "events"]
    _tails: dict[Path, Tail] = field(default_factory=dict)

    def new_lines(self) -> Iterator[dict[str, Any]]:
        """New lines of all files, by time."""
        return (line for _, line in self.new_lines_of_starts())

    def new_lines_of_starts(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """As `new_lines`, each behind the name of its file: which start of the role wrote it."""
        tails = [self._tails.setdefault(path, Tail(path)) for path in log_files(self.run, self.log)]
        merged = heapq.merge(*map(_timed, tails), key=lambda entry: entry[0])
        return ((name, line) for _, name, line in merged)


def _timed(tail: Tail) -> Iterator[tuple[float, str, dict[str, Any]]]:
    """New lines of a file in its own order, each with its time, or a later one that stands before it there."""
    latest = -math.inf
    for line in tail.new_lines():
        latest = max(latest, float(line["time"]))
        yield latest, tail.path.name, line
