"""Files that are hard to read: a pipe, a huge one, one that is empty for a moment, a counted one, a resealed zip."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from pipeline.data.checksums import trailer_of


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


class CountedFile(BufferedReader):
    """Counts the bytes that it is asked for."""

    num_bytes = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        CountedFile.num_bytes += len(data)
        return data


def sealed_zip(data: bytes) -> bytes:
    """Return a zip file without comment with its checksum for one."""
    whole = data[:-2]  # the last field is the length of the comment
    ending = trailer_of(zlib.crc32(whole))
    return whole + len(ending).to_bytes(2, "little") + ending
