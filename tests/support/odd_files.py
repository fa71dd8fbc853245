"""Files that nobody can read to their end: a pipe, for which a reader would wait, and one that is too large."""

from __future__ import annotations

import os
from pathlib import Path


def pipe_at(path: Path) -> Path:
    """Put a named pipe there, into which nobody writes."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def huge_at(path: Path, num_bytes: int = 1 << 30) -> Path:
    """Put a file of that size there, which takes no room."""
    path.unlink(missing_ok=True)
    path.touch()
    os.truncate(path, num_bytes)
    return path
