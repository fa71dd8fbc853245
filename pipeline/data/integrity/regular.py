"""Files are opened as what they should be: damage and other programs leave folders, pipes and files of any size."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

MODEL_JSON_BYTES = 16 << 20
"""Of a JSON file that describes a model or its tokenizer, such as config.json: the largest have some MB."""
_OF_WHAT_LIES_THERE = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EINVAL, errno.ENAMETOOLONG),
    None,  # raised by a library
)
"""What damage can make the system say: the file is missing, or a folder, a link in a circle or a socket, or it names a
place in it that cannot be."""


def machine_failure(error: BaseException) -> OSError | None:
    """The failure of a mount, a disk, a limit or a permission that made `error`, if one did: it says nothing about what
    was written, and may be gone the next time."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno not in _OF_WHAT_LIES_THERE:
            return cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return None


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read. Raises ValueError for what is none (a pipe would be waited for), and OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise ValueError("it is a folder, expected a file" if stat.S_ISDIR(mode) else "it is no regular file")


def read_at_most(path: Path, num_bytes: int) -> bytes:
    """A whole file. Raises as `open_regular` does, and ValueError for a larger file, of which nothing is read."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > num_bytes:
            raise ValueError(f"it is larger than {num_bytes >> 20} MiB")
        data = file.read(num_bytes + 1)
    if len(data) > num_bytes:
        raise ValueError(f"it is larger than {num_bytes >> 20} MiB")
    return data


def read_if_it_ends(path: Path, ending: bytes, num_bytes: int, otherwise: str) -> bytes:
    """A whole file of any size, of which only the last `num_bytes` are read unless `ending` is in them. Raises as
    `open_regular` does, and ValueError, which says `otherwise`."""
    with open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - num_bytes))
        last = file.read(num_bytes)
        if ending not in last:
            raise ValueError(otherwise)
        file.seek(0)
        return file.read()
