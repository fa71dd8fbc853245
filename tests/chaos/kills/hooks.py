"""Faults inside a process of a run: at a line that it writes, half-way through a file, before a file gets its name.

    CASE/armed.json   what should happen next, written by the driver (tests.chaos.kills.driver)
    CASE/fired/ID     it has happened: made exclusively by the process that reached the point, with who was struck
    CASE/pids/NAME    process id and start of the newest process of that name
    CASE/pace         the learner writes no metrics of a step from this one on, until the driver raises the number
    CASE/clock        seconds by which the clock is wrong, for names that begin so: {"collector": 3600}

Only the standard library is wrapped (writing, renaming, the clock): the product is untouched, and knows nothing of it.
A point is EVENT, half:KIND or name:KIND, where KIND is of `KINDS` and EVENT of the run's event log.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

VARIABLE = "EVENKEEL_CHAOS"
"""The folder of the case; set by the driver, inherited by all processes of the run."""
KINDS = {
    "batch": r"batches/.*\.zarr\.zip",
    "evaluation": r"evaluations/.*",
    "logprobs": r"logprobs/.*\.npy",
    "mismatch": r"mismatch/.*\.zarr\.zip",
    "pointer": r"policy/(\.?PUBLISHED.*|published/.*)",
    "update": r"policy/updates/.*",
    "policy": r"policy/.*",
    "commit": r"checkpoints/[^/]*/\.?COMMIT.*",
    "checkpoint": r"checkpoints/.*",
    "metrics": r"metrics/learner.*",
    "event": r"events/.*",
    "epoch": r"epochs/(?!supervisor/\.?ALIVE).*",
    "member": r"engines/.*",
    "model": r"model/.*|\.model\..*",
    "finished": r"finished/.*",
}
"""Kind of file → its path in the run directory; the first that matches."""
_KINDS = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in KINDS.items()))
_EVENT = re.compile(rb'"kind": "(\w+)"')
_STEP = re.compile(rb'"step": (\d+)')
_CLOCK_POLL_S = 0.1
_PACE_POLL_S = 0.02
_GIVE_UP_S = 600.0
_HOST = "from pipeline.episodes.host import main"

_name = ""
_folder = ""
_open: Callable[..., Any] = builtins.open
_write, _rename, _replace, _link, _time, _time_ns = os.write, os.rename, os.replace, os.link, time.time, time.time_ns
_offset, _looked = 0.0, 0.0


def arm(name: str | None) -> None:
    """This process is called `name`; None for one that is no target. Wrap what it writes with."""
    global _name, _folder
    _folder = os.environ[VARIABLE]
    _name = name or ""
    if name is not None:
        _put(f"{_folder}/pids/{name}", f"{os.getpid()} {start_of(os.getpid())}")
    if os.write is not _write:
        return
    os.write = write  # type: ignore[assignment]
    os.rename, os.replace, os.link = (_naming(call) for call in (_rename, _replace, _link))  # type: ignore[assignment]
    builtins.open = io.open = opened  # type: ignore[assignment]
    time.time = wrong_time
    time.time_ns = lambda: int(wrong_time() * 1e9)


def look_in(folder: str) -> None:
    """For the driver, which finds processes and is none of the run."""
    global _folder
    _folder = folder


def name_of(argv: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Which process of a run has this command line."""
    words = " ".join(argv)
    if " role " in words:
        role = argv[argv.index("role") + 1]
        return f"engine-role-{argv[argv.index('role') + 3]}" if role == "engine" else role
    if "launch.run.learn_rank" in argv and "--replay" not in argv and "RANK" in environment:
        return f"rank-{environment['RANK']}"
    if "cpu_server" in words:
        match = re.search(r"engine-(\d+)", environment.get("EVENKEEL_LOG", ""))
        return f"engine-{match[1]}" if match else None
    if "launch_router" in words:
        return "router-server"
    return "supervisor" if "launch.cli train" in words and "--replay" not in argv else None


# ---------------------------------------------------------------------------------------------------- what is wrapped


def write(descriptor: int, data: Any, /) -> int:
    """os.write, of lines of metrics and events."""
    kind = _kind(_path_of(descriptor))
    if kind is None:
        return _write(descriptor, data)
    raw = bytes(data)
    with _points(kind, raw) as half:
        if half:
            written = _write(descriptor, raw[: len(raw) // 2])
            half.strike()
            return written + _write(descriptor, raw[written:])
        return _write(descriptor, raw)


def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
    """open, of files of a run that are written."""
    stream = _open(file, mode, *arguments, **options)
    if not set(mode) & set("wxa+") or (kind := _kind(file)) is None:
        return stream
    return _Written(stream, kind)


class _Written:
    """An open file in which a fault may strike after half of what one call writes."""

    def __init__(self, stream: Any, kind: str) -> None:
        self._stream, self._kind, self._skip = stream, kind, random.randrange(3)

    def write(self, data: Any) -> int:
        self._skip -= 1
        raw = data.encode() if isinstance(data, str) else bytes(memoryview(data).cast("B"))
        with _points(self._kind, raw, wanted=self._skip < 0) as half:
            if not half:
                self._stream.write(data)
            else:
                middle = len(data) // 2 if isinstance(data, str) else len(raw) // 2
                whole = data if isinstance(data, str) else raw
                self._stream.write(whole[:middle])
                self._stream.flush()
                half.strike()
                self._stream.write(whole[middle:])
        return len(data) if isinstance(data, str) else len(raw)

    def close(self) -> None:
        if not self._stream.closed and (fault := _due(f"half:{self._kind}")):
            self._stream.flush()
            fault.strike()
        self._stream.close()

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Any:
        return iter(self._stream)


def _naming(call: Callable[..., None]) -> Callable[..., None]:
    def renamed(source: Any, target: Any, *arguments: Any, **options: Any) -> None:
        kind = _kind(target)
        if (
            kind is not None
            and not os.path.basename(os.fspath(target)).startswith(".")
            and (due := _due(f"name:{kind}"))
        ):
            due.strike()
        call(source, target, *arguments, **options)

    return renamed


def wrong_time() -> float:
    """time.time, with the error that the driver has put into CASE/clock."""
    global _offset, _looked
    now = time.monotonic()
    if now - _looked > _CLOCK_POLL_S:
        _looked = now
        wrong = _get(f"{_folder}/clock") or {}
        _offset = next((float(s) for prefix, s in wrong.items() if _name and _name.startswith(prefix)), 0.0)
    return _time() + _offset


# --------------------------------------------------------------------------------------------------------- the faults


class Due:
    """A fault whose point has been reached."""

    def __init__(self, fault: Mapping[str, Any]) -> None:
        self.fault = fault

    def strike(self) -> None:
        """Do it, unless another process was first, or a victim is not there."""
        fault, found = self.fault, []
        for victim in fault["victims"]:
            pids = find(victim)
            if not pids:
                return
            found.append(pids)
        with suppress(FileExistsError):
            mark = os.open(f"{_folder}/fired/{fault['id']}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            said = dict(time=_time(), by=_name, pids=found)
            _write(mark, json.dumps(said).encode())
            os.close(mark)
            if fault["action"] == "full":
                raise OSError(errno.ENOSPC, "No space left on device (a fault made on purpose)")
            number = signal.SIGSTOP if fault["action"].startswith("stop") else signal.SIGKILL
            for pids in sorted(found, key=lambda pids: os.getpid() in pids):  # itself last
                for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
                time.sleep(fault.get("apart_s", 0.0))


class _Points:
    """Strikes before and after what is written inside; gives the fault that should strike half-way, or None."""

    def __init__(self, before: str | None, after: str | None, half: str | None) -> None:
        self._before, self._after, self._half = before, after, half

    def __enter__(self) -> Due | None:
        if self._before and (due := _due(self._before)):
            due.strike()
        return _due(self._half) if self._half else None

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._after and (due := _due(self._after)):
            due.strike()


def _points(kind: str, data: bytes, *, wanted: bool = True) -> _Points:
    if kind == "metrics" and (match := _STEP.search(data)):
        _wait_for_pace(int(match[1]))
    event = _EVENT.search(data) if kind == "event" else None
    name = None if event is None else event[1].decode()
    return _Points(
        f"before:{name}" if name else None, f"after:{name}" if name else None, f"half:{kind}" if wanted else None
    )


def _due(point: str) -> Due | None:
    """The fault that is armed for the point, and has not fired."""
    for fault in _get(f"{_folder}/armed.json") or ():
        if fault["point"] == point and not os.path.exists(f"{_folder}/fired/{fault['id']}"):
            return Due(fault)
    return None


def _wait_for_pace(step: int) -> None:
    ends = time.monotonic() + _GIVE_UP_S
    while time.monotonic() < ends and step >= (_get(f"{_folder}/pace") or sys.maxsize):
        time.sleep(_PACE_POLL_S)


# ------------------------------------------------------------------------------------------------ processes and files


def find(victim: str) -> list[int]:
    """Process ids of a victim: a name, `scheduler` of an engine, `verifier` of the collector, or `NAME*`, which is the
    process and all below it. Empty when it is not there. Of `host` (environments or tools), `episode` (a fork of such
    a host) and `agent` (a command), all that are there: one of them is the victim."""
    match victim:
        case "self":
            return [os.getpid()]
        case "scheduler":  # the first that a server makes; the second turns tokens into text
            return [p for p in below(find("engine-0")) if "resource_tracker" not in _said(p)][:1]
        case "verifier":
            return [p for p in below(find("collector")) if "resource_tracker" not in _said(p)][-1:]
        case "host" | "episode":
            hosts = {p for p in below(find("collector")) if _HOST in _said(p) and "bwrap" not in _said(p)}
            forks = {p for p in hosts if _parent_of(p) in hosts}
            return sorted(forks if victim == "episode" else hosts - forks)
        case "agent":
            return [p for p in below(find("collector")) if "black_box.py" in _said(p)]
    name, whole = victim.rstrip("*"), victim.endswith("*")
    try:
        with _open(f"{_folder}/pids/{name}") as file:
            pid, started = (int(word) for word in file.read().split())
    except (OSError, ValueError):
        return []
    if start_of(pid) != started:
        return []
    return [pid, *below([pid])] if whole else [pid]


def below(pids: Sequence[int]) -> list[int]:
    """Descendants, in the order of their making."""
    found: list[int] = []
    for pid in pids:
        for thread in _threads(pid):
            with suppress(OSError), _open(f"/proc/{pid}/task/{thread}/children") as file:
                children = [int(word) for word in file.read().split()]
                found += [*children, *below(children)]
    return found


def _threads(pid: int) -> list[str]:
    with suppress(OSError):
        return os.listdir(f"/proc/{pid}/task")
    return []


def start_of(pid: int) -> int | None:
    """When the process was started, in ticks since the machine was; None when there is none, or it is a zombie."""
    try:
        with _open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _parent_of(pid: int) -> int:
    try:
        with _open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _said(pid: int) -> str:
    try:
        with _open(f"/proc/{pid}/cmdline", "rb") as line, _open(f"/proc/{pid}/comm") as name:
            return line.read().decode(errors="replace") + name.read()
    except OSError:
        return ""


def _path_of(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def _kind(path: Any) -> str | None:
    if isinstance(path, int):
        path = _path_of(path)
    text = os.fspath(path)
    inside = f"{_folder}/runs/run/"
    if not isinstance(text, str) or not text.startswith(inside):
        return None
    match = _KINDS.match(text[len(inside) :])
    return None if match is None else match.lastgroup


def _get(path: str) -> Any:
    try:
        with _open(path) as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def _put(path: str, text: str) -> None:
    with _open(f"{path}.{os.getpid()}", "w") as file:
        file.write(text)
    _replace(f"{path}.{os.getpid()}", path)
