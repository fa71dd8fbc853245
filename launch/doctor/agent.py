"""The part of `evenkeel doctor --hosts` that runs on each host: reads orders, answers, a line of JSON each.

    {"do": "hello"}  ──▶  {"host": "node-3", "time": 1790000000.0}

It writes below the folder that an order names, and nowhere else. It ends when its standard input is closed. What it
measures is done by the functions of pipeline.data.files that a run uses too.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.data.files import create_exclusively, fsync_directory, unique_suffix, write_atomically
from pipeline.errors import EvenKeelError

POLL_S = 0.01
CONNECT_S = 5.0
REPLACED_BYTES = 64 << 10
Answer = dict[str, Any]


def hello() -> Answer:
    """Who this is, and what time it thinks it is."""
    return dict(host=socket.gethostname(), pid=os.getpid(), time=time.time())


def look(folder: str) -> Answer:
    """The file system of the folder."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    usage = shutil.disk_usage(path)
    kind, options = mount_of(path.resolve(), Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace"))
    return dict(free=usage.free, total=usage.total, kind=kind, options=options)


def race(folder: str, rounds: int, start_in_s: float, every_s: float) -> Answer:
    """Create file after file exclusively, each at its time, at which other hosts try the same. Returns which were won.

    What the file holds says who won.
    """
    won, begin = [], time.monotonic() + start_in_s
    for number in range(rounds):
        time.sleep(max(0.0, begin + number * every_s - time.monotonic()))
        with suppress(FileExistsError):
            create_exclusively(Path(folder) / f"race-{number:04d}", socket.gethostname())
            won.append(number)
    return dict(won=won)


def replace(path: str, seconds: float) -> Answer:
    """Replace a file again and again by another that holds one letter many times."""
    times, ends = 0, time.monotonic() + seconds
    while time.monotonic() < ends:
        write_atomically(Path(path), chr(ord("a") + times % 26) * REPLACED_BYTES)
        times += 1
    return dict(times=times)


def reread(path: str, seconds: float) -> Answer:
    """Read a file that is being replaced. Returns how often it was whole, torn, missing, or gave an error."""
    counts: dict[str, int] = dict(whole=0, torn=0, missing=0, stale=0)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        try:
            data = Path(path).read_bytes()
        except FileNotFoundError:
            counts["missing"] += 1
        except OSError:
            counts["stale"] += 1
        else:
            counts["whole" if len(data) == REPLACED_BYTES and len(set(data)) == 1 else "torn"] += 1
        time.sleep(POLL_S / 10)
    return dict(counts=counts)


def write(path: str, text: str) -> Answer:
    """Write a file atomically."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(Path(path), text)
    return {}


def watch_once(folder: str, name: str) -> Answer:
    """Whether the file is seen now. A folder that was looked for before may be known as missing for a while."""
    with suppress(OSError):
        return dict(seen=name in os.listdir(folder) and _text(Path(folder) / name) is not None)
    time.sleep(10 * POLL_S)
    return dict(seen=False)


def watch(folder: str, new: list[str], replaced: list[str], within_s: float) -> Iterator[Answer]:
    """Look for files until another host's changes are seen: one answer when all were looked at once, then one for each.

    `new` are looked for by opening them and by listing the folder; of `replaced` the text has to change.
    """
    before = {name: _text(Path(folder) / name) for name in (*new, *replaced)}
    os.listdir(folder)
    waiting = {("open", name) for name in (*new, *replaced)} | {("list", name) for name in new}
    yield dict(looking=len(waiting))
    ends = time.monotonic() + within_s
    while waiting and time.monotonic() < ends:
        listed = set(os.listdir(folder))
        for how, name in sorted(waiting):
            if name in listed if how == "list" else _text(Path(folder) / name) not in (None, before[name]):
                waiting.discard((how, name))
                yield dict(seen=name, by=how)
        time.sleep(POLL_S)
    yield dict(unseen=sorted(waiting))


def append(path: str, lines: int, length: int) -> Answer:
    """Append lines to a file to which other hosts append too."""
    line = (socket.gethostname()[0] * length + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        for _ in range(lines):
            os.write(descriptor, line)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return {}


def count_lines(path: str, length: int) -> Answer:
    """How many lines are whole: of one letter and of the right length."""
    found = Path(path).read_bytes().split(b"\n")
    return dict(whole=sum(len(line) == length and len(set(line)) == 1 for line in found))


def sync(folder: str, times: int, size: int) -> Answer:
    """Seconds of a write with fsync, of the file and of its folder, each."""
    seconds = []
    for _ in range(times):
        path = Path(folder) / f"sync-{unique_suffix()}"
        started = time.perf_counter()
        with path.open("wb") as file:
            file.write(bytes(size))
            file.flush()
            os.fsync(file.fileno())
        fsync_directory(path.parent)
        seconds.append(time.perf_counter() - started)
        path.unlink()
    return dict(seconds=sorted(seconds))


_LISTENING: list[socket.socket] = []


def listen(ports: list[int]) -> Answer:
    """Accept connections on these ports of every interface, 0 being any free one, until the agent ends."""
    found = []
    for port in ports:
        try:
            server = socket.create_server(("", port))
        except OSError:
            found.append(port)  # something listens there already: it accepts, or is not meant for other hosts
            continue
        _LISTENING.append(server)
        found.append(int(server.getsockname()[1]))
        threading.Thread(target=_accept, args=(server,), daemon=True).start()
    return dict(ports=found)


def connect(address: str, ports: list[int]) -> Answer:
    """Why a connection to each port fails; empty where it does not."""
    return dict(problems={str(port): _problem(address, port) for port in ports})


def remove(folder: str) -> Answer:
    """Delete what was written."""
    shutil.rmtree(folder, ignore_errors=True)
    return {}


ORDERS: dict[str, Callable[..., Answer | Iterator[Answer]]] = {
    function.__name__: function
    for function in (
        *(hello, look, race, replace, reread, write, watch, watch_once),
        *(append, count_lines, sync, listen, connect, remove),
    )
}


def mount_of(path: Path, mountinfo: str) -> tuple[str, str]:
    """Kind and options of the file system that holds an absolute path, of the text of /proc/self/mountinfo. Of
    several at one place the last one is seen."""
    best, found = -1, ("", "")
    for line in mountinfo.splitlines():
        mounted, _, about = line.partition(" - ")
        fields = mounted.split()
        point = fields[4].replace("\\040", " ")
        if len(point) >= best and (path == Path(point) or Path(point) in path.parents):
            kind, _, options = about.split(" ", 2)
            best, found = len(point), (kind, f"{fields[5]},{options}")
    return found


def obey(line: str) -> Iterator[Answer]:
    """The answers to one order; the last one has `done`."""
    order = json.loads(line)
    try:
        answer = ORDERS[order.pop("do")](**order)
        if isinstance(answer, dict):
            yield dict(answer, done=True)
            return
        yield from answer
        yield dict(done=True)
    except (OSError, EvenKeelError) as error:
        yield dict(done=True, error=" ".join(str(error).split()))


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None


def _accept(server: socket.socket) -> None:
    while True:
        with suppress(OSError):
            connection, _ = server.accept()
            connection.close()


def _problem(address: str, port: int) -> str:
    try:
        socket.create_connection((address, port), timeout=CONNECT_S).close()
    except OSError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    for order in sys.stdin:
        for reply in obey(order):
            print(json.dumps(reply), flush=True)
