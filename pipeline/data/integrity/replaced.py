"""Small files that are replaced again and again, and their folders, as other hosts see them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pipeline.data.integrity.regular import read_at_most

REREAD_S = 1.0
"""How long a file that cannot be read is read again: file systems of several hosts may show it empty, or answer with an
error, for a moment while it is replaced."""
T = TypeVar("T")


def asked_again(look: Callable[[], T], *, is_whole: Callable[[T], bool] = lambda _: True) -> T:
    """What `look` returns, as soon as that `is_whole`, or in the end. Raises FileNotFoundError at once, and another
    OSError where it stays for REREAD_S."""
    give_up = time.monotonic() + REREAD_S
    while True:
        is_last = time.monotonic() > give_up
        try:
            if is_whole(found := look()) or is_last:
                return found
        except FileNotFoundError:
            raise
        except OSError:
            if is_last:
                raise
        time.sleep(REREAD_S / 20)


def read_replaced(path: Path, num_bytes: int) -> bytes:
    """As `read_at_most`, of a file that others replace; no bytes where it stays empty. Raises FileNotFoundError at
    once, and another OSError where it stays."""
    return asked_again(lambda: read_at_most(path, num_bytes), is_whole=bool)
