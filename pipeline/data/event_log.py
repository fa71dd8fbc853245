"""Write and read the run's two logs: metrics (one line a step) and events (each with its time).

    RUN/metrics/learner-000002.jsonl    RUN/events/collector-000003.jsonl

Every start of a role writes separate files, so no other host tears a line; readers merge the files. A killed process
may leave a torn last line. Readers skip it, and skip and count any other unreadable line. These files explain a run and
draw its report: they decide nothing and never make a run or its report fail. Lines written by an earlier version end in
a checksum, `"crc32": "0a1b2c3d"`, which readers leave out.
"""

from __future__ import annotations

import heapq
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import orjson

from pipeline.data.files import NUMBER, fsync_directory, make_folder
from pipeline.errors import NonFiniteError

EventKind = Literal[
    "issued",
    "dropped",
    "committed",
    "sampled",
    "retried",
    "bad_answer",
    "consumed",
    "published",
    "saved",
    "evaluated",
    "started",
    "environment",
    "recipe_changed",
    "files_changed",
    "sandbox",
    "restarted",
    "joined",
    "admitted",
    "quarantined",
    "left",
    "controlled",
    "no_progress",
    "reward_failed",
    "unsolved",
    "teacher_failed",
    "episode_failed",
    "chat_format",
    "skipped",
    "finished",
]
EVENT_KINDS: tuple[str, ...] = get_args(EventKind)


Log = Literal["metrics", "events", "spans"]
LogName = Literal["metrics", "event"]
Observer = Callable[[LogName, dict[str, Any]], None]
"""A callback with each line after it is written."""
PARENT = "parent"
"""In place of the role in the names of a fork's copies of its parent's logs, which come before its own."""
_END_BYTES = 1 << 20
"""Bytes at a file's end that are searched for the newest line, which has some tens of KB at most."""
_FIELDS: dict[str, dict[str, type]] = {
    "metrics": {"step": int, "time": float},
    "events": {"kind": str, "time": float},
    "spans": {"lane": str, "name": str, "start": float, "seconds": float},
}
"""Fields that readers need in every line of a log."""
_FIELDS_OF_KIND: dict[str, dict[str, type]] = {
    "issued": {"batch": int},
    "committed": {"batch": int, "samples": int},
    "sampled": {"batch": int, "prompt": str, "response": str, "reward_parts": dict, "finish": str},
    "consumed": {"step": int},
    "saved": {"step": int},
    "evaluated": {"version": int},
    "started": {"process": str},
    "environment": {"role": str, "host": str, "cores": int, "python": str, "packages": dict},
    "files_changed": {"what": str, "step": int},
    "joined": {"engine": int},
    "admitted": {"engine": int},
    "quarantined": {"engine": int},
    "left": {"engine": int},
    "controlled": {"step": int, "rung": str, "because": str},
    "no_progress": {"who": str, "over": bool},
    "reward_failed": {"reason": str, "detail": str},
    "unsolved": {"batches": int, "solved_at": float, "highest": float},
    "teacher_failed": {"reason": str, "detail": str},
    "episode_failed": {"group": int, "again": bool, "reason": str},
    "chat_format": {"why": str},
    "skipped": {"step": int},
}
"""Further fields that readers need in an event of a kind."""
_START = re.compile(rf"(.*)-({NUMBER})")


class EventLog:
    """A writer of both logs for one start of a role. Every line has `time`: seconds since 1970, UTC."""

    def __init__(self, run: Path, source: str, observers: Sequence[Observer] = ()) -> None:
        """`source` names the start, and its files: Epoch.name."""
        self.metrics_path = run / "metrics" / f"{source}.jsonl"
        self.events_path = run / "events" / f"{source}.jsonl"
        self._observers = observers
        self._begun: set[Path] = set()
        """Files that this process has begun, so that it has already removed an earlier process's torn line."""

    def metrics(self, step: int, **fields: Any) -> None:
        """Append the line of `step`; a step trained again after a resume gets another line. Raises NonFiniteError,
        naming the field, and writes nothing, when a number is NaN or infinite."""
        self._append("metrics", self.metrics_path, {"step": step, "time": time.time(), **fields})

    def event(self, kind: EventKind, **fields: Any) -> None:
        """Append an event. Raises as `metrics` does, and ValueError for an unknown kind."""
        if kind not in EVENT_KINDS:
            raise ValueError(f"event kind {kind!r} is unknown, expected one of {', '.join(EVENT_KINDS)}")
        self._append("event", self.events_path, {"kind": kind, "time": time.time(), **fields})

    def _append(self, log: LogName, path: Path, fields: dict[str, Any]) -> None:
        """Append a line atomically. A step's line is durable before its checkpoint. Raises OSError with the file."""
        line = {key: _plain(key, value) for key, value in fields.items()}
        is_new = not path.exists()
        make_folder(path.parent)
        if path not in self._begun:
            # Complete a last line that lacks its line end; remove a torn one.
            data = path.read_bytes() if path.exists() else b""
            if torn := data[data.rfind(b"\n") + 1 :]:
                if parse_line(torn) is None:
                    os.truncate(path, len(data) - len(torn))
                else:
                    with path.open("ab") as file:
                        file.write(b"\n")
            self._begun.add(path)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            before = os.fstat(descriptor).st_size
            rest = memoryview((json.dumps(line, ensure_ascii=False) + "\n").encode())
            try:
                while rest:  # a write that fills a disk is cut short, the next one fails
                    rest = rest[os.write(descriptor, rest) :]
            except OSError as error:
                with suppress(OSError):
                    os.ftruncate(descriptor, before)  # the next line must not extend half of this one
                error.filename = str(path)
                raise
            if log == "metrics":
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if is_new and log == "metrics":
            fsync_directory(path.parent)
        for observer in self._observers:
            observer(log, line)


Prepare = Callable[[dict[str, Any]], dict[str, Any]]
"""A function applied to each line as it is read, for example to drop fields."""


def read_metrics(
    run: Path, damage: list[str] | None = None, *, prepare: Prepare = lambda line: line
) -> list[dict[str, Any]]:
    """Return one line per step, ascending, from the newest start that trained it; `damage` as in `read_lines`."""
    by_step: dict[int, dict[str, Any]] = {}
    for path in log_files(run, "metrics"):
        for line in read_lines(path, "metrics", damage):
            by_step[line["step"]] = prepare(line)
    return [line for _, line in sorted(by_step.items())]


def read_events(
    run: Path, kind: EventKind | None = None, damage: list[str] | None = None, *, prepare: Prepare = lambda line: line
) -> list[dict[str, Any]]:
    """Return all events or those of a kind by time, keeping the order of each source; `damage` as in `read_lines`."""
    merged: list[tuple[float, str, int, dict[str, Any]]] = []
    for path in log_files(run, "events"):
        latest = -math.inf
        for place, line in enumerate(read_lines(path, "events", damage)):
            latest = max(latest, float(line["time"]))
            if kind is None or line["kind"] == kind:
                merged.append((latest, path.stem, place, prepare(line)))
    merged.sort(key=lambda entry: entry[:3])
    return [line for *_, line in merged]


def newest_line(
    run: Path, folder: Literal["metrics", "events"], kind: EventKind | None = None
) -> dict[str, Any] | None:
    """Return the newest line of a log, or event of a kind, or None. Reads only the ends of files. Raises OSError."""
    for path in reversed(log_files(run, folder)):
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _END_BYTES))
            ends = file.read(_END_BYTES).splitlines(keepends=True)
        for line in reversed(ends):
            parsed = parse_line(line, folder)
            if parsed is not None and (kind is None or parsed["kind"] == kind):
                return parsed
    return None


def log_files(run: Path, folder: Literal["metrics", "events"]) -> list[Path]:
    """Return the files of a log: a fork's copies of its parent's, then each role's in the order of starts."""

    def by_start(path: Path) -> tuple[bool, str, int]:
        match = _START.fullmatch(path.stem)
        role, start = (match[1], int(match[2])) if match else (path.stem, 0)
        return role != PARENT, role, start

    return sorted((run / folder).glob("*.jsonl"), key=by_start)


def _plain(key: str, value: Any) -> Any:
    """Convert to JSON's types. Raises NonFiniteError for a number that is not finite, at any depth."""
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


def read_lines(path: Path, log: Log, damage: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file that have the log's fields. A sentence that counts others is added to `damage`."""
    passed_over, first = 0, 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if (parsed := parse_line(line, log)) is not None:
                    yield parsed
                elif line.endswith(b"\n"):
                    passed_over, first = passed_over + 1, first or number
    except FileNotFoundError:
        return
    except OSError as error:
        if damage is not None:
            damage.append(f"{path} could not be read to its end ({error.strerror})")
    if passed_over and damage is not None:
        lines, were = ("1 line", "was") if passed_over == 1 else (f"{passed_over} lines", "were")
        damage.append(f"{lines} of {path} could not be read and {were} passed over, the first is line {first}")


def parse_line(line: bytes, log: Log | None = None) -> dict[str, Any] | None:
    """Parse a line; None if it is torn, damaged, or lacks fields of `log`."""
    try:
        value = orjson.loads(line)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    value.pop("crc32", None)  # of an earlier version
    if log is not None and not _has(value, _FIELDS[log]):
        return None
    if log == "events" and value["kind"] in _FIELDS_OF_KIND and not _has(value, _FIELDS_OF_KIND[value["kind"]]):
        return None
    return value


def _has(line: Mapping[str, Any], fields: Mapping[str, type]) -> bool:
    for key, kind in fields.items():
        value = line.get(key)
        if kind is float:
            if (type(value) is not float and type(value) is not int) or not math.isfinite(value):
                return False
        elif type(value) is not kind:
            return False
    return True


class LogTail:
    """A reader of the lines appended to a log since the last call."""

    def __init__(self, run: Path, log: Literal["metrics", "events"]) -> None:
        self._run, self._log = run, log
        self._offsets: dict[Path, int] = {}
        """The bytes read of each file."""

    def new_lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (file name, line) of all new lines, by time. Lines lost to a failed read come with the next call."""
        files = map(self._new_lines_of, log_files(self._run, self._log))
        return ((name, line) for _, name, line in heapq.merge(*files, key=lambda entry: entry[0]))

    def _new_lines_of(self, path: Path) -> Iterator[tuple[float, str, dict[str, Any]]]:
        """Yield a file's new complete lines in order, each with the latest time so far."""
        latest = -math.inf
        with path.open("rb") as file:
            file.seek(self._offsets.setdefault(path, 0))
            for line in file:
                if not line.endswith(b"\n"):
                    return
                if (parsed := parse_line(line, self._log)) is not None:
                    latest = max(latest, float(parsed["time"]))
                    yield latest, path.name, parsed
                self._offsets[path] += len(line)
