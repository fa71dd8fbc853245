"""The run's two logs: metrics (one line a step) and events (what happened, when).

    RUN/metrics/learner-000002.jsonl    RUN/events/collector-000003.jsonl

Every start of a role writes files of its own, so a line is never torn by another host; readers merge them. A killed
process may leave a torn last line. Readers pass over it, and over any other line that cannot be read, which they count.
These files explain a run and draw its report: nothing is decided by them, and they never make a run or its report fail.
Lines carry no checksum; those that an earlier version wrote end in one, `"crc32": "0a1b2c3d"`, which readers leave out.
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
    "skipped",
    "finished",
]
EVENT_KINDS: tuple[str, ...] = get_args(EventKind)


Log = Literal["metrics", "events", "spans"]
LogName = Literal["metrics", "event"]
Observer = Callable[[LogName, dict[str, Any]], None]
"""Called with each line after it is written."""
PARENT = "parent"
"""Stands for the role in the name of what a fork has of its parent's log: what was there before all its own starts."""
_END_BYTES = 1 << 20
"""Of a file, where its newest line is looked for: a line has some tens of KB at most."""
_FIELDS: dict[str, dict[str, type]] = {
    "metrics": {"step": int, "time": float},
    "events": {"kind": str, "time": float},
    "spans": {"lane": str, "name": str, "start": float, "seconds": float},
}
"""What readers take for granted of every line of a log."""
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
    "skipped": {"step": int},
}
"""What readers take for granted of an event of a kind, beside that."""
_START = re.compile(rf"(.*)-({NUMBER})")


class EventLog:
    """Appends to the two logs of one start of a role. Every line has `time`: seconds since 1970, UTC."""

    def __init__(self, run: Path, source: str, observers: Sequence[Observer] = ()) -> None:
        """`source` names the start, and the files: Epoch.name."""
        self.metrics_path = run / "metrics" / f"{source}.jsonl"
        self.events_path = run / "events" / f"{source}.jsonl"
        self._observers = observers
        self._begun: set[Path] = set()
        """Files to which this process has written: only it does, so what is torn was left by an earlier process."""

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
        """Write a line whole or not at all. A step's line is durable before the step's checkpoint is; the last events
        may go when the power does. Raises OSError that names the file."""
        line = {key: _plain(key, value) for key, value in fields.items()}
        is_new = not path.exists()
        make_folder(path.parent)
        if path not in self._begun:
            # A last line that lacks its line end is ended; what is torn is removed.
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
                    os.ftruncate(descriptor, before)  # the next line must not grow onto half of this one
                error.filename = str(path)
                raise
            if log == "metrics":
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if is_new and log == "metrics":
            fsync_directory(path.parent)
            fsync_directory(path.parent.parent)  # an earlier start may have made the folder, and died before this
        for observer in self._observers:
            observer(log, line)


Prepare = Callable[[dict[str, Any]], dict[str, Any]]
"""Called on each line as it is read; what it returns, which may be smaller, is kept."""


def read_metrics(
    run: Path, damage: list[str] | None = None, *, prepare: Prepare = lambda line: line
) -> list[dict[str, Any]]:
    """Return one line a step, by step: the last one of the newest start that trained it. `damage` is as in
    `read_lines`."""
    by_step: dict[int, dict[str, Any]] = {}
    for path in log_files(run, "metrics"):
        for line in read_lines(path, "metrics", damage):
            by_step[line["step"]] = prepare(line)
    return [line for _, line in sorted(by_step.items())]


def read_events(
    run: Path, kind: EventKind | None = None, damage: list[str] | None = None, *, prepare: Prepare = lambda line: line
) -> list[dict[str, Any]]:
    """Return all events, or those of one kind, by time; the clocks of hosts may differ. Those of one source stay in
    order. `damage` is as in `read_lines`."""
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
    """Return the last line of a log, or the last event of a kind, from the newest start of a role that wrote one; None
    without any. Reads the ends of files alone. Raises OSError."""
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
    """Return the files of one log: what a fork has of its parent's, then those of each role in the order of starts."""

    def by_start(path: Path) -> tuple[bool, str, int]:
        match = _START.fullmatch(path.stem)
        role, start = (match[1], int(match[2])) if match else (path.stem, 0)
        return role != PARENT, role, start

    return sorted((run / folder).glob("*.jsonl"), key=by_start)


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


def read_lines(path: Path, log: Log, damage: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the lines of one file. A line that cannot be read, or lacks what readers of this log ask for, is passed
    over; a sentence that names the file and counts them is added to `damage`. A torn last line is not counted."""
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
    """Return what a line says; None where it is torn or damaged, or lacks what readers of `log` ask for."""
    try:
        value = orjson.loads(line)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    value.pop("crc32", None)  # an earlier version's
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
    """Reads the lines that were appended to the files of a log since the last call."""

    def __init__(self, run: Path, log: Literal["metrics", "events"]) -> None:
        self._run, self._log = run, log
        self._offsets: dict[Path, int] = {}
        """Bytes of each file whose lines were taken."""

    def new_lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the new lines of all files, by time, each behind the name of its file: which start of the role wrote
        it. Lines that were not taken, as a read fails, come at the next call."""
        files = map(self._new_lines_of, log_files(self._run, self._log))
        return ((name, line) for _, name, line in heapq.merge(*files, key=lambda entry: entry[0]))

    def _new_lines_of(self, path: Path) -> Iterator[tuple[float, str, dict[str, Any]]]:
        """Yield the new whole lines of a file in its own order, each with its time, or the latest one before it."""
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
