"""The folders that confined code can write to: how much is in them, and how they are emptied.

What lies there was made by code that may mean harm: trees deeper than any path or any recursion, millions of empty
files, folders without permissions. So nothing here recurses, and no path is longer than two names.
"""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from pathlib import Path

from pipeline.rewards.sandbox.limits import MAX_FILES_BYTES

_LONGEST_PATH = 600
_ENTRY_BYTES = 2**14
"""What a file or folder counts at least."""


def bytes_of_mount(folder: Path) -> int:
    """What is used of the file system that is mounted there."""
    status = os.statvfs(folder)
    blocks = (status.f_blocks - status.f_bfree) * status.f_frsize
    return max(blocks, (status.f_files - status.f_ffree) * _ENTRY_BYTES)


def bytes_below(folder: Path, enough: int = MAX_FILES_BYTES) -> int:
    """What the files below it take; counted until it is more than enough."""
    total, folders = 0, [os.fspath(folder)]
    while folders and total <= enough:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    total += max(status.st_blocks * 512, _ENTRY_BYTES)
                    if len(entry.path) > _LONGEST_PATH:  # nobody needs such a tree, and each look at it takes seconds
                        return 2 * enough
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except OSError:  # gone meanwhile, or not to be listed
            continue
    return total


def empty(folder: Path, keep: frozenset[str] = frozenset()) -> None:
    """Remove what lies there, but for the names to keep. Only while nobody writes to it."""
    numbers = itertools.count()
    while True:
        removed = False
        for name in set(os.listdir(folder)) - keep:
            with suppress(OSError):
                removed |= _remove(os.path.join(folder, name), folder, numbers)
        if not removed:
            return


def remove(folder: Path) -> None:
    """Empty it and remove it, if it is there."""
    with suppress(OSError):
        empty(folder)
        os.rmdir(folder)


def _remove(path: str, top: Path, numbers: itertools.count[int]) -> bool:
    """Remove a file, or a folder, whose own folders move up to `top` first. Returns True; raises OSError."""
    if not _is_folder(path):
        os.unlink(path)
        return True
    os.chmod(path, 0o700)
    for name in os.listdir(path):
        below = os.path.join(path, name)
        if _is_folder(below):
            os.chmod(below, 0o700)
            os.rename(below, os.path.join(top, f".removed-{next(numbers)}-{os.getpid()}"))
        else:
            os.unlink(below)
    os.rmdir(path)
    return True


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)
