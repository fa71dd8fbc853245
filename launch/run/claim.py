"""Claim a run for one supervisor: a later start takes over, but not while an earlier one is visibly at work.

    RUN/epochs/supervisor/000002   a start (pipeline.data.epochs); an earlier supervisor ends when it finds a later one
    RUN/epochs/supervisor/ALIVE    rewritten every second by the supervisor at work

A second start watches ALIVE for some seconds, and is refused if it changes; locks and other hosts' clocks are not
trusted. Only a job that a scheduler restarts takes over at once: its former host may be cut off, and still at work.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.data.epochs import Epoch, claim, epoch_folder
from pipeline.data.files import write_atomically
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import EvenKeelError, RunConflictError

BEAT_S = 1.0
WATCH_S = 4.0
_POLL_S = 0.2
_MOST_CHARACTERS = 1000


@contextmanager
def claimed(run: RunDirectory, *, takes_over: bool = False) -> Iterator[Epoch]:
    """Claim the run as its supervisor. Raises RunConflictError while another one is at work, unless `takes_over`."""
    alive = epoch_folder(run.path, "supervisor") / "ALIVE"
    first, ends = (None if takes_over else _read(alive)), time.monotonic() + WATCH_S
    while first is not None and time.monotonic() < ends:
        time.sleep(_POLL_S)
        now = _read(alive)
        if now is None:
            break  # the other supervisor has just ended
        if now != first:
            raise RunConflictError(
                f"{run.path} is being trained by another process ({now.partition(',')[2].strip()}); wait for it, stop "
                "it, or use another run.name"
            )
    epoch = claim(run.path, "supervisor")
    ended, line = threading.Event(), f"{epoch.number}.{{}}, host {socket.gethostname()}, process {os.getpid()}\n"

    def beat() -> None:
        number = 0
        while not ended.wait(BEAT_S):
            with suppress(OSError, EvenKeelError):  # the next beat may succeed
                if epoch.is_superseded():
                    return
                number += 1
                write_atomically(alive, line.format(number))

    beats = threading.Thread(target=beat, name="supervisor-alive", daemon=True)
    write_atomically(alive, line.format(0))
    beats.start()
    try:
        yield epoch
    finally:
        ended.set()
        beats.join()
        if not epoch.is_superseded():
            alive.unlink(missing_ok=True)


def _read(alive: Path) -> str | None:
    try:
        with alive.open(encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_CHARACTERS)
    except FileNotFoundError:
        return None
