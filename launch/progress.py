"""Show progress on stderr, since stdout is for results: a bar on a terminal, elsewhere a line every EVERY_S."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

EVERY_S = 10.0
"""No silence is longer, where there is no terminal."""
SLOW_S = 2.0
"""Steps that take longer have a line each."""
_said_at = time.monotonic()
"""When this process said its last line of progress."""
_is_command = False
"""Whether this process is one command. Then blocks of some seconds each, and what is between, make one long silence."""


def begin_command() -> None:
    """Count the silence from the start of this process's only command."""
    global _is_command
    _is_command = True
    note_said()


def begin_block() -> None:
    """Count the silence from here on, but for a command's."""
    if not _is_command:
        note_said()


def note_said() -> None:
    """Count the silence from now on."""
    global _said_at
    _said_at = time.monotonic()


def is_quiet() -> bool:
    """Whether nothing was said for EVERY_S."""
    return time.monotonic() - _said_at >= EVERY_S


def is_due(steps: int, passed_s: float) -> bool:
    """Whether a line should be said, so many steps and seconds after the last one: the next step may come too late."""
    return passed_s >= EVERY_S or (
        steps > 0 and (passed_s > SLOW_S * steps or passed_s * (steps + 1) / steps > EVERY_S)
    )


@contextmanager
def counted(what: str, total: int) -> Iterator[Callable[..., None]]:
    """A bar that is gone afterwards, or lines. Call what it yields with how many of `total` are done and, if there is
    one, a remark that is shown beside it."""
    console = Console(stderr=True)
    if not console.is_terminal:
        with _lines(what, total) as show_line:
            yield show_line
        return
    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=total)

        def show(done: int, remark: str = "") -> None:
            progress.update(task, completed=done, description=remark)

        yield show


@contextmanager
def going_on(what: str) -> Iterator[None]:
    """A spinner while the block runs, or a line every EVERY_S."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        with _lines(f"note: {what}", 0):
            yield


@contextmanager
def _lines(what: str, total: int) -> Iterator[Callable[..., None]]:
    begin_block()
    began, ended, lock = time.monotonic(), threading.Event(), threading.Lock()
    done, remark, said_done, said_at = 0, "", 0, began

    def say_if_due() -> float:
        """Return the seconds to the next line."""
        nonlocal said_done, said_at
        with lock:
            now = time.monotonic()
            if is_quiet() or is_due(done - said_done, now - said_at):
                said_done, said_at = done, now
                note_said()
                parts = [what, f"{done}/{total}" if total else "", remark, f"({now - began:.0f} s)"]
                print(" ".join(filter(None, parts)), file=sys.stderr, flush=True)
            return max(0.0, _said_at + EVERY_S - time.monotonic())

    def show(now_done: int, now_remark: str = "") -> None:
        nonlocal done, remark
        done, remark = now_done, now_remark
        say_if_due()

    def watch() -> None:
        while not ended.wait(say_if_due()):
            pass

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield show
    finally:
        ended.set()
        thread.join()
