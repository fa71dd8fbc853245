"""The run's two logs: metrics (one line a step) and events (what happened, when).

    RUN/metrics/learner-000002.jsonl    RUN/events/collector-000003.jsonl

Every start of a role writes files of its own, so a line is never torn by another host; readers merge them. Every line
ends in its checksum (pipeline.data.checksums). A killed process may leave a torn last line. Readers pass over
it, and over any line that is not as it was written, which they count. These files explain a run and draw its report;
they are never read to decide what to train on (the batches are), and never make a run or its report fail.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np

from pipeline.data.checksums import MAX_BYTES, reason, seal, unseal
from pipeline.data.files import NUMBER, fsync_directory, make_folder, open_regular
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


LogName = Literal["metrics", "event"]
Observer = Callable[[LogName, dict[str, Any]], None]
"""Called with each line after it is written."""
_MORE = re.compile(rb'"crc32": "[0-9a-f]{8}"\}.', re.DOTALL)
"""A line that goes on behind its checksum, as no torn one does: its line end is another character."""
PARENT = "parent"
"""Stands for the role in the name of what a fork has of its parent's log: what was there before all its own starts."""
_END_BYTES = 1 << 20
"""Of a file, where its newest line is looked for: a line has some tens of KB at most."""
_METRICS: dict[str, type] = {"step": int, "time": float}
_EVENT: dict[str, type] = {"kind": str, "time": float}
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
        line = {key: _plain(key, value) for key, value in fields.items()}
        if path not in self._begun:
            _cut_torn_line(path)
            self._begun.add(path)
        _append(path, line, durable=log == "metrics")
        for observer in self._observers:
            observer(log, line)


Prepare = Callable[[dict[str, Any]], dict[str, Any]]
"""Called on each line as it is read; what it returns, which may be smaller, is kept."""


def _as_it_is(line: dict[str, Any]) -> dict[str, Any]:
    return line


def read_metrics(run: Path, damage: list[str] | None = None, *, prepare: Prepare = _as_it_is) -> list[dict[str, Any]]:
    """Return one line a step, by step: the last one of the newest start that trained it. `damage` is as in
    `read_lines`."""
    by_step: dict[int, dict[str, Any]] = {}
    for path in log_files(run, "metrics"):
        for line in read_lines(path, damage, has=_METRICS):
            by_step[line["step"]] = prepare(line)
    return [line for _, line in sorted(by_step.items())]


def read_events(
    run: Path, kind: EventKind | None = None, damage: list[str] | None = None, *, prepare: Prepare = _as_it_is
) -> list[dict[str, Any]]:
    """Return all events, or those of one kind, by time; the clocks of hosts may differ. Those of one source stay in
    order. `damage` is as in `read_lines`."""
    merged: list[tuple[float, str, int, dict[str, Any]]] = []
    for path in log_files(run, "events"):
        latest = -math.inf
        for place, line in enumerate(read_lines(path, damage, has=_EVENT)):
            latest = max(latest, float(line["time"]))
            if kind is None or line["kind"] == kind:
                merged.append((latest, path.stem, place, prepare(line)))
    merged.sort(key=lambda entry: entry[:3])
    return [line for *_, line in merged]


def newest_line(
    run: Path, folder: Literal["metrics", "events"], kind: EventKind | None = None
) -> dict[str, Any] | None:
    """The last line of a log, or the last event of a kind, from the newest start of a role that wrote one; None without
    any. Reads the ends of files alone, and passes over what is torn or damaged there. Raises OSError, ValueError."""
    for path in reversed(log_files(run, folder)):
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _END_BYTES))
            ends = file.read(_END_BYTES).splitlines(keepends=True)
        for line in reversed(ends):
            parsed = parse_line(line)
            if parsed is not None and (kind is None or parsed.get("kind") == kind):
                return parsed
    return None


def log_files(run: Path, folder: Literal["metrics", "events"]) -> list[Path]:
    """The files of one log: what a fork has of its parent's, then those of each role in the order of its starts."""
    return sorted((run / folder).glob("*.jsonl"), key=_by_start)


def _by_start(path: Path) -> tuple[bool, str, int]:
    match = _START.fullmatch(path.stem)
    role, start = (match[1], int(match[2])) if match else (path.stem, 0)
    return role != PARENT, role, start


def _append(path: Path, line: dict[str, Any], *, durable: bool) -> None:
    """A step's line is durable before the step's checkpoint is; the last events may go when the power does."""
    is_new = not path.exists()
    data = seal(json.dumps(line, ensure_ascii=False) + "\n").encode()
    make_folder(path.parent)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        before = os.fstat(descriptor).st_size
        try:
            _write_whole(descriptor, data, path)
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, before)  # the next line must not grow onto half of this one
            raise
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if is_new and durable:
        fsync_directory(path.parent)
        fsync_directory(path.parent.parent)  # an earlier start may have made the folder, and died before it did this


def _write_whole(descriptor: int, data: bytes, path: Path) -> None:
    """Raises OSError that names the file."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]  # a write that fills a disk is cut short, the next one fails
        except OSError as error:
            error.filename = str(path)
            raise


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


def _cut_torn_line(path: Path) -> None:
    """Remove a torn last line, so that the next one does not grow onto it; end one that lacks its line end alone."""
    data = path.read_bytes() if path.exists() else b""
    torn = data[data.rfind(b"\n") + 1 :]
    if not torn:
        return
    if parse_line(torn + b"\n") is not None:
        with path.open("ab") as file:
            file.write(b"\n")
    else:
        os.truncate(path, len(data) - len(torn))


def read_lines(
    path: Path, damage: list[str] | None = None, *, has: Mapping[str, type] = MappingProxyType({})
) -> Iterator[dict[str, Any]]:
    """Yield the lines of one file. A line that is not as it was written, or lacks what each `has`, is passed over; a
    sentence that names the file and counts them is added to `damage`. A torn last line is no damage. Behind a line that
    is longer than any log has, nothing is read."""
    passed_over, first = 0, 0
    try:
        with open_regular(path) as file:
            for number, line in enumerate(iter(partial(file.readline, MAX_BYTES), b""), start=1):
                whole = line.endswith(b"\n")
                parsed = parse_line(line if whole else line + b"\n")
                if parsed is not None and all(_is_a(parsed.get(key), kind) for key, kind in has.items()):
                    yield parsed
                elif len(line) == MAX_BYTES and not whole:
                    raise ValueError(f"line {number} is longer than {MAX_BYTES >> 20} MiB")  # its end may be far away
                elif whole or _MORE.search(line):
                    passed_over, first = passed_over + 1, first or number
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        if damage is not None:
            damage.append(f"{path} could not be read to its end ({reason(error)})")
    if passed_over and damage is not None:
        lines = "1 damaged line" if passed_over == 1 else f"{passed_over} damaged lines"
        damage.append(f"{lines} of {path} passed over, the first is line {first}")


def _is_a(value: Any, kind: type) -> bool:
    """Whether a value of a line is a number or a text, as `kind` says."""
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and not isinstance(value, bool)


def whole_lines(path: Path) -> str:
    """The lines that `read_lines` yields of one file, with their checksums. Raises OSError, and ValueError for what is
    no file."""
    with open_regular(path) as file:
        lines = takewhile(lambda line: len(line) < MAX_BYTES, iter(partial(file.readline, MAX_BYTES), b""))
        return b"".join(line for line in lines if parse_line(line) is not None).decode()


def parse_line(line: bytes) -> dict[str, Any] | None:
    """A line with its end, without its checksum; None for what a killed process left of one, or that is damaged."""
    try:
        value = json.loads(unseal(line))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
