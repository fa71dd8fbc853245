"""RUN/policy/PUBLISHED/000012: every engine that gets requests serves version 12, or a later one.

Each version is announced by a file of its own, created exclusively; the highest one counts. No file is replaced: a
learner that was frozen just before it announced version 2, and thaws when its successor has announced version 4, adds
a name that says nothing new.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pipeline.data.files import NUMBER, make_folder
from pipeline.data.integrity.sealed import create_sealed, read_sealed
from pipeline.errors import StoreError

_NUMBER = re.compile(rf"(?:{NUMBER})")
_KEPT = 3
"""Announcements that stay: a listing of a moment ago may still name the one before the highest."""
_REREAD_S = 1.0
"""How long none is taken for one that a file system of several hosts does not show for a moment."""


def announced(folder: Path) -> list[int]:
    """The versions that have a file, ascending; none where the folder is missing."""
    with suppress(FileNotFoundError):
        return sorted(int(name) for name in os.listdir(folder) if _NUMBER.fullmatch(name))
    return []


def highest(folder: Path) -> int:
    """The version that counts. Raises StoreError when there is none, or when its file is damaged."""
    give_up = time.monotonic() + _REREAD_S
    while not (found := announced(folder)):
        if time.monotonic() > give_up:
            raise StoreError(
                f"{folder} names no version; start the run with `evenkeel train`, or, if it has begun, "
                f"repair it: `evenkeel repair {folder.parents[1]}`"
            )
        time.sleep(_REREAD_S / 20)
    version = found[-1]
    path, remedy = folder / f"{version:06d}", f"repair the run: `evenkeel repair {folder.parents[1]}`"
    try:
        said = read_sealed(path, remedy).strip()
    except FileNotFoundError:
        return version  # a higher one came, and this one went: a cached listing may name it for a minute
    if said != str(version):
        raise StoreError(f"{path} says version {said[:100]}; {remedy}")
    return version


def announce(folder: Path, version: int, fence: Callable[[], None]) -> None:
    """Make `version` known, unless it is. `fence` raises where this process may write no more."""
    make_folder(folder)
    fence()
    with suppress(FileExistsError):
        create_sealed(folder / f"{version:06d}", f"{version}\n")
    found = announced(folder)
    if found[-1] == version:
        for older in found[:-_KEPT]:
            (folder / f"{older:06d}").unlink(missing_ok=True)
