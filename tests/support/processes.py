"""Processes by the words of their command lines, while others beside them end; and one that SIGKILL does not end."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import psutil


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
