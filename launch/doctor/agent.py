"""Obey orders on each host of `evenkeel doctor --hosts`: a line of JSON each, and one in answer.

    {"do": "look", "folder": "/shared/runs/.doctor-1"}  ──▶  {"free": …, "total": …, "kind": "nfs4", "options": "rw"}

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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.data.files import create_exclusively, write_atomically
from pipeline.errors import EvenKeelError

CONNECT_S = 5.0
Answer = dict[str, Any]
_LISTENING: list[socket.socket] = []


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


def write(path: str, text: str) -> Answer:
    """Write a file atomically."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(Path(path), text)
    return {}


def read(folder: str, names: list[str]) -> Answer:
    """Read small files of a folder, None where one is not seen, and list the folder."""
    texts: dict[str, str | None] = dict.fromkeys(names)
    for name in names:
        with suppress(OSError):
            texts[name] = (Path(folder) / name).read_text(encoding="utf-8")
    with suppress(OSError):
        return dict(texts=texts, listed=sorted(os.listdir(folder)))
    return dict(texts=texts, listed=[])


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
    """Say why a connection to each port fails; empty where it does not."""
    problems = dict.fromkeys(map(str, ports), "")
    for port in ports:
        try:
            socket.create_connection((address, port), timeout=CONNECT_S).close()
        except OSError as error:
            problems[str(port)] = str(error)
    return dict(problems=problems)


def remove(folder: str) -> Answer:
    """Delete what was written."""
    shutil.rmtree(folder, ignore_errors=True)
    return {}


ORDERS: dict[str, Callable[..., Answer]] = {
    function.__name__: function for function in (look, race, write, read, listen, connect, remove)
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


def obey(line: str) -> Answer:
    """Answer one order."""
    order = json.loads(line)
    try:
        return dict(ORDERS[order.pop("do")](**order), done=True)
    except (OSError, EvenKeelError) as error:
        return dict(done=True, error=" ".join(str(error).split()))


def _accept(server: socket.socket) -> None:
    while True:
        with suppress(OSError):
            connection, _ = server.accept()
            connection.close()


if __name__ == "__main__":
    for order in sys.stdin:
        print(json.dumps(obey(order)), flush=True)
