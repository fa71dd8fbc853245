"""Carry out orders on each host of `evenkeel doctor --hosts`: a line of JSON for an order, and one for its answer.

    {"do": "look", "folder": "/shared/runs/.doctor-1"}  ──▶  {"free": …, "total": …, "kind": "nfs4", "options": "rw"}

The agent writes only below the folder that an order names, and ends when its standard input is closed. It measures by
the functions of pipeline.data.files that a run uses.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.data.files import create_exclusively, write_atomically
from pipeline.errors import EvenKeelError

CONNECT_S = 5.0


def mount_of(path: Path, mountinfo: str) -> tuple[str, str]:
    """Return kind and options of the file system that holds an absolute path, from the text of /proc/self/mountinfo. Of
    several mounts at one place the last one counts."""
    best, found = -1, ("", "")
    for line in mountinfo.splitlines():
        mounted, _, about = line.partition(" - ")
        fields = mounted.split()
        point = fields[4].replace("\\040", " ")
        if len(point) >= best and (path == Path(point) or Path(point) in path.parents):
            kind, _, options = about.split(" ", 2)
            best, found = len(point), (kind, f"{fields[5]},{options}")
    return found


def obey(line: str) -> dict[str, Any]:
    """Carry out an order, and return its answer, with `error` if it failed."""
    order = json.loads(line)
    answer: dict[str, Any] = dict(done=True)
    try:
        match order.pop("do"):
            case "look":
                path = Path(order["folder"])
                path.mkdir(parents=True, exist_ok=True)
                usage = shutil.disk_usage(path)
                mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
                kind, options = mount_of(path.resolve(), mounts)
                answer |= dict(free=usage.free, total=usage.total, kind=kind, options=options)
            case "race":
                # Create file after file exclusively, each at the time at which the other hosts try it.
                won, begin = [], time.monotonic() + order["start_in_s"]
                for number in range(order["rounds"]):
                    time.sleep(max(0.0, begin + number * order["every_s"] - time.monotonic()))
                    with suppress(FileExistsError):
                        create_exclusively(Path(order["folder"]) / f"race-{number:04d}", socket.gethostname())
                        won.append(number)
                answer["won"] = won
            case "write":
                path = Path(order["path"])
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, order["text"])
            case "read":
                answer |= dict(texts=dict.fromkeys(order["names"]), listed=[])  # None if it is not seen
                for name in order["names"]:
                    with suppress(OSError):
                        answer["texts"][name] = (Path(order["folder"]) / name).read_text(encoding="utf-8")
                with suppress(OSError):
                    answer["listed"] = sorted(os.listdir(order["folder"]))
            case "listen":
                answer["ports"] = []
                for port in order["ports"]:  # on every interface, until the agent ends; 0 is any free port
                    try:
                        server = socket.create_server(("", port))
                    except OSError:
                        answer["ports"].append(port)  # its listener accepts, or is not meant for other hosts
                        continue
                    answer["ports"].append(int(server.getsockname()[1]))
                    threading.Thread(target=_accept, args=(server,), daemon=True).start()
            case "connect":
                answer["problems"] = dict.fromkeys(map(str, order["ports"]), "")
                for port in order["ports"]:
                    try:
                        socket.create_connection((order["address"], port), timeout=CONNECT_S).close()
                    except OSError as error:
                        answer["problems"][str(port)] = str(error)
            case "remove":
                shutil.rmtree(order["folder"], ignore_errors=True)
    except (OSError, EvenKeelError) as error:
        return dict(done=True, error=" ".join(str(error).split()))
    return answer


def _accept(server: socket.socket) -> None:
    while True:
        with suppress(OSError):
            connection, _ = server.accept()
            connection.close()


if __name__ == "__main__":
    for order in sys.stdin:
        print(json.dumps(obey(order)), flush=True)
