"""Folders of files that are too large to carry a checksum each: one file lists the SHA-256 of all others.

    policy/000012/SHA256SUMS   of a policy or model folder, as `sha256sum -c SHA256SUMS` reads it; itself sealed
    checkpoints/000012/COMMIT  of a checkpoint (pipeline.trainer.checkpoints)

What is put into a folder later carries its own checksum. Folders within the folder are not listed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pipeline.data.files import fsync_directory, is_temporary
from pipeline.data.integrity.regular import open_regular
from pipeline.data.integrity.sealed import read_sealed, write_sealed
from pipeline.errors import StoreError

CHECKSUMS = "SHA256SUMS"
_FILES_AT_ONCE = 8


class Fingerprint(NamedTuple):
    """Of one file."""

    num_bytes: int
    sha256: str


def fingerprints(files: Sequence[Path]) -> list[Fingerprint | None]:
    """Of several files at once: others wait meanwhile, and a folder may have hundreds of gigabytes. None for what is
    missing, or no file."""
    with ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
        return list(threads.map(_fingerprint, files))


def list_checksums(folder: Path) -> None:
    """Write the list for the files that lie in `folder` now. Raises StoreError when one vanishes meanwhile."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and not _is_apart(path.name))
    lines = []
    for path, one in zip(files, fingerprints(files), strict=True):
        if one is None:
            raise StoreError(f"{path} vanished while {CHECKSUMS} was made; see who removes it, then start again")
        lines.append(f"{one.sha256}  {path.name}\n")
    write_sealed(folder / CHECKSUMS, "".join(lines))


def verify_folder(folder: Path, remedy: str, *, required: bool = True) -> None:
    """Compare every listed file with the list. Raises StoreError, which names the first that differs and the `remedy`.

    A folder without a list fails; with `required` False it passes: others than this program have made it.
    """
    path = folder / CHECKSUMS
    try:
        text = read_sealed(path, remedy)
    except FileNotFoundError:
        if required:
            raise StoreError(f"{path} is missing; {remedy}") from None
        return
    lines = (line.partition("  ") for line in text.splitlines())
    expected = {name: sha256 for sha256, _, name in lines}
    if any("/" in name or name in ("", "..") for name in expected):
        raise StoreError(f"{path} names files outside {folder}; {remedy}")
    for name, found in zip(expected, fingerprints([folder / name for name in expected]), strict=True):
        if found is None or found.sha256 != expected[name]:
            what = "missing" if found is None else f"damaged (its SHA-256 is not that in {CHECKSUMS})"
            raise StoreError(f"{folder / name} is {what}; {remedy}")


def remove_listed(folder: Path, name: str) -> None:
    """Delete a file of a folder, and then its line in the list: the others stay as they are. Nothing where it is gone;
    one that is killed between is completed by the next call. A list that is damaged stays so."""
    if not folder.is_dir():
        return
    (folder / name).unlink(missing_ok=True)
    with suppress(FileNotFoundError, StoreError):
        lines = read_sealed(folder / CHECKSUMS, "").splitlines(keepends=True)
        kept = [line for line in lines if line.rstrip("\n").partition("  ")[2] != name]
        if not kept:
            (folder / CHECKSUMS).unlink()
        elif kept != lines:
            write_sealed(folder / CHECKSUMS, "".join(kept))
    fsync_directory(folder)


def sync_files(paths: Iterable[Path]) -> None:
    """Make the contents of files and folders durable."""
    for path in paths:
        if path.is_dir():
            fsync_directory(path)
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _is_apart(name: str) -> bool:
    return name == CHECKSUMS or is_temporary(name)


def _fingerprint(file: Path) -> Fingerprint | None:
    try:
        with open_regular(file) as stream:
            return Fingerprint(file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())
    except (FileNotFoundError, ValueError):
        return None
