"""Seal files with a checksum of their content, and folders with a list of checksums, so that readers find damage.

    {"url": "http://127.0.0.1:30000", "crc32": "0a1b2c3d"}     a JSON object, or a line of a log: a last member
    12                                                         any other text: a last line, which YAML and
    # crc32 0a1b2c3d                                           sha256sum take for a comment
    000012.npy                                                 14 bytes behind the values, which numpy does not read
    policy/000012/SHA256SUMS   of a policy or model folder, as `sha256sum -c SHA256SUMS` reads it; itself sealed
    checkpoints/000012/COMMIT  of a checkpoint (pipeline.trainer.checkpoints)

The checksum covers every other byte, and a read file must equal, byte for byte, the output of sealing. Zip files are
sealed by their comment (pipeline.data.zarr_zip). A file added to a folder later carries a checksum itself, and folders
within the folder are not listed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.data.files import (
    asked_again,
    create_exclusively,
    fsync_directory,
    is_temporary,
    open_regular,
    read_at_most,
    read_if_it_ends,
    replacing,
    write_atomically,
)
from pipeline.errors import StoreError

MAX_BYTES = 64 << 20
"""The largest sealed text. Manifests and checksums of models with tens of thousands of tensors take some MB."""
_MEMBER = re.compile(rb'(, )?"crc32": "[0-9a-f]{8}"\}\n\Z')
_CHANGED = "its checksum differs: it was changed, or written under another name"
_LINE = re.compile(rb"# crc32 [0-9a-f]{8}\n\Z")
_LONGEST = len(', "crc32": "00000000"}\n')
"""Length of the longest checksum: only so many bytes are searched for one."""
TRAILER = re.compile(rb"crc32 [0-9a-f]{8}\Z")
"""The end of a sealed array, and the comment of a sealed zip file."""
TRAILER_BYTES = 14
_NPY_HEADER_BYTES = 4096


def crc32(data: bytes | memoryview) -> str:
    """Return eight hexadecimal digits, which differ whenever up to 32 neighboring bits do."""
    return f"{zlib.crc32(data):08x}"


def trailer_of(value: int) -> bytes:
    """Return the trailer for data whose zlib.crc32 is `value`."""
    return f"crc32 {value:08x}".encode()


def seal(text: str) -> str:
    """Return `text`, which must end in a line end, with its checksum."""
    if not text.endswith("\n"):
        raise ValueError(f"a text to seal ends in {text[-20:]!r}, expected a line end")
    checksum = crc32(text.encode())
    if text.startswith("{") and text.endswith("}\n"):
        body = text[:-2]
        return f'{body}{"" if body == "{" else ", "}"crc32": "{checksum}"}}\n'
    return f"{text}# crc32 {checksum}\n"


def unseal(data: bytes) -> str:
    """Return the sealed text. Raises ValueError, naming the problem, unless every byte is unchanged."""
    tail = max(0, len(data) - _LONGEST)
    if match := _MEMBER.search(data, tail):
        whole = data[: match.start()] + b"}\n"
    elif match := _LINE.search(data, tail):
        whole = data[: match.start()]
    else:
        raise ValueError("it does not end in its checksum")
    text = whole.decode(errors="replace")
    if not text.endswith("\n") or seal(text).encode() != data:
        raise ValueError("its checksum differs")
    return text


def write_sealed(path: Path, text: str) -> None:
    """Replace `path` with the sealed `text`, atomically and durably."""
    write_atomically(path, seal(text))


def create_sealed(path: Path, text: str) -> None:
    """Create `path` with the sealed `text`. Raises FileExistsError if it exists."""
    create_exclusively(path, seal(text))


def write_sealed_json(path: Path, value: dict[str, Any]) -> None:
    write_sealed(path, json.dumps(value) + "\n")


def read_sealed(path: Path, remedy: str, *, is_replaced: bool = False) -> str:
    """Read the sealed text of `path`, which others may replace (`is_replaced`). Raises StoreError with the `remedy`."""
    try:
        data = (
            asked_again(lambda: read_at_most(path, MAX_BYTES), is_whole=bool)
            if is_replaced
            else read_at_most(path, MAX_BYTES)
        )
        return unseal(data)
    except ValueError as error:
        raise StoreError(f"{path} is damaged ({reason(error)}); {remedy}") from error


def read_sealed_json(path: Path, remedy: str, *, is_replaced: bool = False) -> dict[str, Any]:
    """Read the sealed JSON object of `path`. Raises as `read_sealed`, and StoreError for anything but a JSON object."""
    text = read_sealed(path, remedy, is_replaced=is_replaced)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is damaged ({reason(error)}); {remedy}") from error
    if not isinstance(value, dict):
        raise StoreError(f"{path} is damaged (it holds no JSON object); {remedy}")
    return value


def reason(error: Exception) -> str:
    """Return an error's message on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def write_sealed_array(path: Path, values: NDArray[np.float32]) -> None:
    """Replace `path` with the values [n], readable by numpy.load, and a checksum of them and the file's name."""
    memory = io.BytesIO()
    np.save(memory, values, allow_pickle=False)
    with replacing(path) as file:
        file.write(memory.getbuffer())
        file.write(trailer_of(zlib.crc32(path.name.encode(), zlib.crc32(memory.getbuffer()))))


def read_sealed_array(path: Path, remedy: str) -> NDArray[np.float32] | None:
    """Read the values [n]; None without a file. Raises StoreError, without allocating what a damaged header claims."""
    try:
        data = read_if_it_ends(path, b"crc32 ", TRAILER_BYTES, _CHANGED)
        body = data[:-TRAILER_BYTES]
        if data[-TRAILER_BYTES:] != trailer_of(zlib.crc32(path.name.encode(), zlib.crc32(body))):
            raise ValueError(_CHANGED)
        stream = io.BytesIO(body)
        if np.lib.format.read_magic(stream) != (1, 0):
            raise ValueError("it is a .npy file of another version than 1.0")
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream, max_header_size=_NPY_HEADER_BYTES)
        values = body[stream.tell() :]
        if dtype != np.float32 or len(shape) != 1 or 4 * shape[0] != len(values):
            raise ValueError(f"its header says {dtype} {shape}, behind it are {len(values)} bytes")
        return np.frombuffer(values, "<f4").astype(np.float32)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise StoreError(f"{path} is damaged ({reason(error)}); {remedy}") from error


CHECKSUMS = "SHA256SUMS"
_FILES_AT_ONCE = 8


class Fingerprint(NamedTuple):
    num_bytes: int
    sha256: str


def fingerprints(files: Sequence[Path]) -> list[Fingerprint | None]:
    """Return the fingerprints of several files, computed in parallel; None for a missing or irregular file."""

    def fingerprint(file: Path) -> Fingerprint | None:
        try:
            with open_regular(file) as stream:
                return Fingerprint(file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())
        except (FileNotFoundError, ValueError):
            return None

    with ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
        return list(threads.map(fingerprint, files))


def list_checksums(folder: Path) -> None:
    """Write the list of the files that are in `folder` now. Raises StoreError when one vanishes meanwhile."""
    files = sorted(
        path for path in folder.iterdir() if path.is_file() and path.name != CHECKSUMS and not is_temporary(path.name)
    )
    lines = []
    for path, one in zip(files, fingerprints(files), strict=True):
        if one is None:
            raise StoreError(f"{path} vanished while {CHECKSUMS} was made; see who removes it, then start again")
        lines.append(f"{one.sha256}  {path.name}\n")
    write_sealed(folder / CHECKSUMS, "".join(lines))


def verify_folder(folder: Path, remedy: str, *, required: bool = True) -> None:
    """Compare every listed file. Raises StoreError for the first that differs, with the `remedy`. A folder without a
    list fails if `required`; other programs write none."""
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
    """Delete a file of a folder, then its line in the list, unless that is damaged. A killed call can be repeated."""
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
    """Make the content of files and folders durable."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
