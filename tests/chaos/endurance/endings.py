"""However a run ends, nothing is left behind: no process, no shared memory, no temporary file of it."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.endurance.long_run import begin, start_train, steps_done

STEPS = 6
DEADLINE_S = 600.0
ENDED_S = 60.0
"""Longest time until all processes are gone after the supervisor is."""
_POLL_S = 0.1


def end_so(kind: str, folder: Path, details: dict[str, Any]) -> str:
    """The verdict on a run that ends so: `finished`, `ctrl-c`, `sigterm`, `kill-9`, `error`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder = folder.absolute()
    steps = STEPS if kind == "finished" else 1000
    # A reward function that fails on what a model writes is found by the collector, when everything else runs already.
    task = dict(reward="tests.support.rewards:fails_unless_right") if kind == "error" else {}
    run = begin(folder, steps, overrides=dict(task=task, checkpoint=dict(every=2)))
    train = start_train(folder)
    keeper = hold_shm(train)
    seen: dict[int, psutil.Process] = {}
    try:
        wait(lambda: _see(train, seen) or kind in ("finished", "error") or steps_done(run) >= 3, train, "three steps")
        if number := dict([("ctrl-c", signal.SIGINT), ("sigterm", signal.SIGTERM), ("kill-9", signal.SIGKILL)]).get(
            kind
        ):
            os.kill(train.pid, number)
        wait(lambda: _see(train, seen) or train.poll() is not None, train, f"the end ({kind})", ended=True)
        _, alive = psutil.wait_procs(list(seen.values()), timeout=ENDED_S)
        found = [f"outlived the run: {_line(process)}" for process in alive]
        details |= dict(status=train.returncode, processes=len(seen), steps=steps_done(run))
        found += _status(kind, train.returncode, folder)
        found += _left(folder, run, Path("/proc", str(keeper.pid), "root/dev/shm") if keeper else None, kind)
        return "; ".join(found) or "ok"
    finally:
        for process in (*seen.values(), train, *([keeper] if keeper else [])):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for own in (train, *([keeper] if keeper else [])):
            own.wait(30)
        shutil.rmtree((folder / "tmp").resolve(), ignore_errors=True)


def hold_shm(train: psutil.Popen) -> psutil.Popen | None:
    """A process in the same namespace, which keeps the run's /dev/shm so that it can be looked at afterwards."""
    with suppress(OSError):
        ends = time.monotonic() + 10
        while time.monotonic() < ends:
            if os.readlink(f"/proc/{train.pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt"):
                time.sleep(0.5)  # the mount itself
                return psutil.Popen(["nsenter", f"--mount=/proc/{train.pid}/ns/mnt", "sleep", "3600"])
            time.sleep(0.05)
    return None


def wait(condition: Callable[[], object], train: psutil.Popen, what: str, *, ended: bool = False) -> None:
    """Raises AssertionError after a deadline, or when the run ends before."""
    ends = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < ends, f"waited {DEADLINE_S:g} s for {what}"
        assert ended or train.poll() is None, f"train ended with {train.returncode} before {what}"
        time.sleep(_POLL_S)


def _see(train: psutil.Popen, seen: dict[int, psutil.Process]) -> None:
    """Remember every process that the run ever had."""
    with suppress(psutil.NoSuchProcess):
        for process in train.children(recursive=True):
            if process.pid not in seen or seen[process.pid] != process:
                seen[process.pid] = process


def _status(kind: str, status: int, folder: Path) -> list[str]:
    said = (folder / "train.err").read_text().strip()
    wanted = {"finished": 0, "ctrl-c": 0, "sigterm": 0, "kill-9": -signal.SIGKILL, "error": 1}[kind]
    found = [] if status == wanted else [f"exit status {status}, expected {wanted}: {said[-200:]}"]
    if "Traceback" in said:
        found.append("a traceback")
    return found


def _left(folder: Path, run: Path, shm: Path | None, kind: str) -> list[str]:
    """After kill -9 nobody is left who could take anything away: the next start does, as the temporary files say."""
    found = []
    there = {path.relative_to(folder): path for path in (folder / "tmp").rglob("*")}
    if kind != "kill-9":
        names = sorted(map(str, there))
        found += [f"{len(names)} left in the temporary folder: {', '.join(names[:4])}"] if names else []
        names = sorted(str(path.relative_to(run)) for path in run.rglob("*.tmp"))
        found += [f"{len(names)} temporary files in the run: {', '.join(names[:4])}"] if names else []
    if shm is not None:
        noted = {path.name for path in there if kind == "kill-9"}
        names = sorted(path.name for path in shm.iterdir() if not noted & set(path.stem.split("_")))
        found += [f"{len(names)} left in shared memory: {', '.join(names[:4])}"] if names else []
    return found


def _line(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())[-100:]
    return str(process.pid)
