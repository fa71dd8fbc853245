"""The run's two line logs: metrics.jsonl (one line a step) and events.jsonl (what happened, when).

A line is one write to a file opened with O_APPEND, so several processes of a machine may append to one file. A killed
process may leave a torn last line; the next one to open the file ends it, and readers skip it. These files explain a
run and draw its report; they are never read to decide what to train on (the batches are).
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from pipeline.errors import NonFiniteError, StoreError

EventKind = Literal[
    "issued",
    "dropped",
    "committed",
    "retried",
    "consumed",
    "published",
    "saved",
    "evaluated",
    "started",
    "restarted",
    "finished",
]
EVENT_KINDS: tuple[str, ...] = get_args(EventKind)


class EventLog:
    """Appends to the two logs in `directory`. Every line has `time`: seconds since 1970, UTC."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.metrics_path = directory / "metrics.jsonl"
        self.events_path = directory / "events.jsonl"
        _end_torn_line(self.metrics_path)
        _end_torn_line(self.events_path)

    def metrics(self, step: int, **fields: Any) -> None:
        """Append the line of `step`. A step that is trained again after a resume gets another line.

        Raises NonFiniteError, naming the field, and writes nothing, when a number is NaN or infinite.
        """
        _append(self.metrics_path, {"step": step, "time": time.time(), **fields})

    def event(self, kind: EventKind, **fields: Any) -> None:
        """Append an event. Raises as `metrics` does, and ValueError for an unknown kind."""
        if kind not in EVENT_KINDS:
            raise ValueError(f"event kind {kind!r} is unknown, expected one of {', '.join(EVENT_KINDS)}")
        _append(self.events_path, {"kind": kind, "time": time.time(), **fields})


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The last line of each step, by step."""
    return [line for _, line in sorted({line["step"]: line for line in _read(directory / "metrics.jsonl")}.items())]


def read_events(directory: Path, kind: EventKind | None = None) -> list[dict[str, Any]]:
    """All events, or those of one kind, in the order written."""
    return [line for line in _read(directory / "events.jsonl") if kind is None or line["kind"] == kind]


def _append(path: Path, line: dict[str, Any]) -> None:
    data = (json.dumps({key: _plain(key, value) for key, value in line.items()}, ensure_ascii=False) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        written = os.write(descriptor, data)
    finally:
        os.close(descriptor)
    if written != len(data):
        raise StoreError(f"{path}: wrote {written} of {len(data)} bytes; free some disk space and start again")


def _plain(key: str, value: Any) -> Any:
    """JSON's own types; refuses what is not a finite number, at any depth."""
    match value:
        case None | bool() | str():
            return value
        case Path():
            return str(value)
        case np.generic() | np.ndarray():
            return _plain(key, value.tolist())
        case int():
            return value
        case float():
            if not math.isfinite(value):
                raise NonFiniteError(f"{key} is {value}, expected a finite number; find where it diverged before it")
            return value
        case dict():
            return {str(name): _plain(f"{key}.{name}", part) for name, part in value.items()}
        case list() | tuple():
            return [_plain(f"{key}[{place}]", part) for place, part in enumerate(value)]
        case _:
            raise TypeError(f"{key} is a {type(value).__name__}, expected numbers, text, lists or dicts of them")


def _end_torn_line(path: Path) -> None:
    """Give a torn last line its end, so that the next line does not grow onto it."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        torn = file.read(1) != b"\n"
    if torn:
        with path.open("ab") as file:
            file.write(b"\n")


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    parsed = (parse_line(line) for line in path.read_bytes().split(b"\n"))
    return [line for line in parsed if line is not None]


def parse_line(line: bytes) -> dict[str, Any] | None:
    """None for what a killed process left of a line."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
