"""Files as file systems of several hosts may show them for a moment while they are replaced."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def empty_for(seconds: float, path: Path) -> Iterator[None]:
    """In the block the file is empty, and whole again after so long."""
    whole = path.read_bytes()
    path.write_bytes(b"")
    again = threading.Timer(seconds, path.write_bytes, [whole])
    again.start()
    try:
        yield
    finally:
        again.join()
