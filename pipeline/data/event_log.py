"""The run's two logs: metrics (one line a step) and events (what happened, when).

    RUN/metrics/learner-000002.jsonl    RUN/events/collector-000003.jsonl

Every start of a role writes files of its own, so a line is never torn by another host; readers merge them. A killed
process may leave a torn last line; readers skip it. These files explain a run and draw its report; they are never read
to decide what to train on (the batches are).
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from pipeline.errors import NonFiniteError, StoreError

EventKind = Literal[
    "issued",
    "dropped",
    "committed",
    "retried",
    "bad_answer",
    "consumed",
    "published",
    "saved",
    "evaluated",
    "started",
    "sandbox",
    "restarted",
    "quarantined",
    "admitted",
    "controlled",
    "no_progress",
    "skipped",
    "finished",
]
EVENT_KINDS: tuple[str, ...] = get_args(EventKind)


LogName = Literal["metrics", "event"]
Observer = Callable[[LogName, dict[str, Any]], None]
"""Called with each line after it is written."""
_START = re.compile(r"(.*)-(\d{6,})")


class EventLog:
    """Appends to the two logs of one start of a role. Every line has `time`: seconds since 1970, UTC."""

    def __init__(self, run: Path, source: str, observers: Sequence[Observer] = ()) -> None:
        """`source` names the start, and the files: Epoch.name."""
        self.metrics_path = run / "metrics" / f"{source}.jsonl"
        self.events_path = run / "events" / f"{source}.jsonl"
        self._observers = observers
        _end_torn_line(self.metrics_path)
        _end_torn_line(self.events_path)

    def metrics(self, step: int, **fields: Any) -> None:
        """Append the line of `step`. A step that is trained again after a resume gets another line.

        Raises NonFiniteError, naming the field, and writes nothing, when a number is NaN or infinite.
        """
        self._append("metrics", self.metrics_path, {"step": step, "time": time.time(), **fields})

    def event(self, kind: EventKind, **fields: Any) -> None:
        """Append an event. Raises as `metrics` does, and ValueError for an unknown kind."""
        if kind not in EVENT_KINDS:
            raise ValueError(f"event kind {kind!r} is unknown, expected one of {', '.join(EVENT_KINDS)}")
        self._append("event", self.events_path, {"kind": kind, "time": time.time(), **fields})

    def _append(self, log: LogName, path: Path, fields: dict[str, Any]) -> None:
        line = {key: _plain(key, value) for key, value in fields.items()}
        _append(path, line)
        for observer in self._observers:
            observer(log, line)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """One line a step, by step: the last one of the newest start that trained it."""
    lines = (line for path in log_files(run, "metrics") for line in _read(path))
    return [line for _, line in sorted({line["step"]: line for line in lines}.items())]


def read_events(run: Path, kind: EventKind | None = None) -> list[dict[str, Any]]:
    """All events, or those of one kind, by time; the clocks of hosts may differ. Those of one source stay in order."""
    merged: list[tuple[float, str, int, dict[str, Any]]] = []
    for path in log_files(run, "events"):
        latest = -math.inf
        for place, line in enumerate(_read(path)):
            latest = max(latest, float(line["time"]))
            merged.append((latest, path.stem, place, line))
    merged.sort(key=lambda entry: entry[:3])
    return [line for *_, line in merged if kind is None or line["kind"] == kind]


def log_files(run: Path, folder: Literal["metrics", "events"]) -> list[Path]:
    """The files of one log; those of a role in the order of its starts."""
    return sorted((run / folder).glob("*.jsonl"), key=_by_start)


def _by_start(path: Path) -> tuple[str, int]:
    match = _START.fullmatch(path.stem)
    return (match[1], int(match[2])) if match else (path.stem, 0)


def _append(path: Path, line: dict[str, Any]) -> None:
    data = (json.dumps(line, ensure_ascii=False) + "\n").encode()
    path.parent.mkdir(exist_ok=True)
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
