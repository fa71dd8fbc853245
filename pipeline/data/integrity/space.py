"""A disk that is full: asked about before much is written, and said in one line by whoever meets it.

A process that meets it ends as one whose run has failed (DiskFullError is fatal): started again it would fail again,
and leave a log behind each time. What is committed stays, and the same command goes on once there is room.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.errors import DiskFullError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No space, a used up quota, a file that may not grow."""
SPARE_BYTES = 1 << 20
"""For what is written beside it: events, records, a log's last lines."""
_TORCH_SAYS = (
    *("No space left on device", "Disk quota exceeded", "file write failed", "iostream error"),
    "unexpected pos ",  # its writer finds at the end that less was written
)
_UNITS = ("bytes", "KB", "MB", "GB", "TB")


def require_space(folder: Path, num_bytes: int, what: str) -> None:
    """Raises DiskFullError when the file system of `folder` has no room for `num_bytes` more (a quota is met later)."""
    with suppress(OSError):  # a file system that cannot say it will say it when it is full
        found = os.statvfs(folder)
        free, needed = found.f_bavail * found.f_frsize, num_bytes + SPARE_BYTES
        if free < needed:
            raise DiskFullError(
                f"the disk of {folder} is too full for {what}: it needs {amount(needed)}, {amount(free)} are free; "
                f"free {amount(needed - free)} more, then give the same command: it goes on from what is committed"
            )


@contextmanager
def full_disk_said(folder: Path, what: str = "a file of it") -> Iterator[None]:
    """Raises DiskFullError for whatever a full disk made the block raise, torch's errors without a number included."""
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:
        if (met := _met(error)) is None:
            raise
        path = met.filename if isinstance(met, OSError) and isinstance(met.filename, str) else what
        raise DiskFullError(
            f"the disk of {folder} is full: {path} could not be written ({_trouble(met)}{_free(folder)}); free some "
            "space, then give the same command: it goes on from what is committed"
        ) from error


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder, and in those within it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def amount(num_bytes: float) -> str:
    """`3.4 GB`."""
    power = min(int(math.log(max(num_bytes, 1), 1000) + 1e-9), len(_UNITS) - 1)
    return f"{num_bytes / 1000**power:.{min(power, 1)}f} {_UNITS[power]}"


def _met(error: BaseException | None) -> BaseException | None:
    """The error of a full disk among an error and its causes."""
    seen = 0
    while error is not None and seen < 20:
        if isinstance(error, OSError) and error.errno in FULL:
            return error
        if isinstance(error, RuntimeError) and any(said in str(error) for said in _TORCH_SAYS):
            return error
        error, seen = error.__cause__ or error.__context__, seen + 1
    return None


def _trouble(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return " ".join(str(error).split())[:200]


def _free(folder: Path) -> str:
    with suppress(OSError):
        found = os.statvfs(folder)
        return f", {amount(found.f_bavail * found.f_frsize)} are free"
    return ""
