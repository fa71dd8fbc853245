"""`evenkeel train` as a process of its own, watched from outside; processes by the words of their command lines."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from launch.run.processes import end_tree
from pipeline.data.event_log import read_events, read_metrics
from tests.support.runs import ROOT, environment


class Training:
    """A run under way, and what its directory says."""

    def __init__(self, process: psutil.Popen, run: Path, log: Path) -> None:
        self.process, self.run, self.log = process, run, log

    def until(self, condition: Callable[[], Any], what: str, deadline_s: float = 400) -> Any:
        """What `condition` finds, once it finds something. Fails when the run ends before."""
        ends = time.monotonic() + deadline_s
        while not (found := condition()):
            assert self.process.poll() is None, f"ended before {what}: {self.said()}"
            assert time.monotonic() < ends, f"waited {deadline_s:g} s for {what}"
            time.sleep(0.05)
        return found

    def finish(self, deadline_s: float = 400) -> str:
        """Wait for its end, which must be a good one; returns what it has said."""
        assert self.process.wait(deadline_s) == 0, self.said()
        return self.said()

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def steps(self) -> int:
        return len(read_metrics(self.run))

    def events(self, kind: Any, engine: int, since: float = 0.0) -> list[dict[str, Any]]:
        return [e for e in read_events(self.run, kind) if e.get("engine") == engine and e["time"] > since]

    def restarts(self, process: str, since: float = 0.0) -> list[dict[str, Any]]:
        return [e for e in read_events(self.run, "restarted") if e["process"] == process and e["time"] > since]

    def with_words(self, words: str) -> list[psutil.Process]:
        """Its processes whose command line holds the words."""
        return with_words(self.process.children(recursive=True), words)


@contextmanager
def training(recipe: Path, run: Path) -> Iterator[Training]:
    """`evenkeel train`, in a session of its own; ended with the block, and all below it."""
    log = recipe.with_suffix(".said")
    with log.open("w", encoding="utf-8") as said:
        process = psutil.Popen(
            [sys.executable, "-m", "launch.cli", "train", str(recipe)],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            yield Training(process, run, log)
        finally:
            if process.poll() is None:
                process.terminate()
                with suppress(psutil.TimeoutExpired):
                    process.wait(120)
            end_tree(process.pid)


def with_words(processes: Iterable[psutil.Process], words: str) -> list[psutil.Process]:
    """Those whose arguments, joined by spaces, hold `words`; a space at an end of `words` is an end of an argument too.
    One that has ended meanwhile has none."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if words in f" {' '.join(process.cmdline())} ":
                found.append(process)
    return found


@contextmanager
def unkillable(process: subprocess.Popen[Any]) -> Iterator[None]:
    """As a process that waits for a disk (state D): signals change nothing, and whoever waits without a deadline waits
    for ever. It is ended afterwards."""

    def wait(timeout: float | None = None) -> int:
        assert timeout is not None, "nobody may wait without a deadline"
        raise subprocess.TimeoutExpired(process.args, timeout)

    try:
        with mock.patch.multiple(process, wait=wait, kill=lambda: None, terminate=lambda: None):
            yield
    finally:
        process.kill()
        process.wait(20)
