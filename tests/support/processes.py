"""Processes by the words of their command lines, while others beside them end."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

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
