"""Write and read a run's array files: each is one zipped Zarr v3 group with a checksum.

Arrays are split along their first axis alone, which counts samples or tokens: finely enough that a rank reads its
share, coarsely enough that a small array has one chunk. A chunk is a contiguous piece of the array's memory,
compressed, with a crc32c. The comment of the zip file is a crc32 of all bytes before the comment's length, which covers
headers, names and padding too. Writing holds one chunk in memory at a time.

Parts of a file are read by seeking. Each chunk that is read is compared with its crc32c, and with a digest that the
caller may have. Zarr's reader takes 1.8 to 3.5 times the processor time for it (tests/bench/shares.py); any Zarr reads
the files.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c
import numpy as np
import zarr
from numcodecs import zstd
from numpy.typing import NDArray
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.core.buffer import Buffer
from zarr.storage import MemoryStore

from pipeline.data.checksums import TRAILER, TRAILER_BYTES, trailer_of
from pipeline.data.files import machine_failure, open_regular, read_if_it_ends
from pipeline.errors import StoreError
from precision.text import one_line

PIECES = 256
"""Chunks of a large array. Reading a contiguous part reads one chunk too much, on average: 1/256 of the array."""
LEAST_BYTES = 64 << 10
"""Smallest chunk of several: below it, a chunk's overhead outweighs its use."""
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)
_LEVEL = 1
_NOT_SEALED = "it does not end in its checksum"
_COMMENT_BYTES = TRAILER_BYTES.to_bytes(2, "little")
"""The length of the comment of a zip file, which stands before it."""
_METADATA = "zarr.json"
_CODECS = ["bytes", "zstd", "crc32c"]
_CRC_BYTES = 4
_DECODING = (
    *(ValueError, LookupError, EOFError, OverflowError, RecursionError),
    *(struct.error, zlib.error, zipfile.BadZipFile),
)
"""Errors that damaged bytes can cause in a reader."""


def chunk_rows(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> int:
    """Return the rows of the first axis in each chunk of an array with at least one axis."""
    row_bytes = dtype.itemsize * math.prod(shape[1:])
    wanted = max(-(-shape[0] // PIECES), -(-LEAST_BYTES // max(row_bytes, 1)))
    return min(max(shape[0], 1), wanted)


def chunk_digests(array: NDArray[np.generic]) -> list[str]:
    """Return the SHA-256 of each chunk's raw little-endian bytes, in order; the last one is not padded."""
    return [hashlib.sha256(chunk.data).hexdigest() for chunk in chunks(array)]


def chunks(array: NDArray[np.generic], *, padded: bool = False) -> Iterator[NDArray[np.uint8]]:
    """Yield the raw little-endian bytes of each chunk, in order, as views if possible; `padded` zero-fills the last."""
    rows = chunk_rows(array.shape, array.dtype)
    chunk_bytes = rows * array.dtype.itemsize * math.prod(array.shape[1:])
    for start in range(0, len(array) if array.size else 0, rows):
        part = np.ascontiguousarray(array[start : start + rows], array.dtype.newbyteorder("<"))
        found = part.reshape(-1).view(np.uint8)
        missing = chunk_bytes - len(found)
        yield np.pad(found, (0, missing)) if padded and missing else found


class _SealedOutput:
    """The output of zipfile, without seeking, so that every byte comes once and in order."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.crc32 = 0
        self._last = b""
        """The last two bytes so far: at the end of a zip file, the length of its comment."""

    def write(self, data: bytes) -> int:
        whole = self._last + data
        body, self._last = whole[:-2], whole[-2:]
        self.crc32 = zlib.crc32(body, self.crc32)
        self._file.write(body)
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def write_zarr_zip(file: BinaryIO, attributes: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write the sealed group into an open file; `attributes` are JSON.

    The same content gives the same bytes: keys are sorted, dates constant. Zarr makes the metadata; chunks are encoded
    here in Zarr's format, without its event loop and copies.
    """
    output = _SealedOutput(file)
    metadata: dict[str, Buffer] = {}
    group = zarr.create_group(MemoryStore(metadata), zarr_format=3, attributes=dict(attributes))
    for name, data in arrays.items():
        group.create_array(
            name,
            shape=data.shape,
            dtype=data.dtype,
            chunks=(chunk_rows(data.shape, data.dtype), *(max(size, 1) for size in data.shape[1:])),
            compressors=[ZstdCodec(level=_LEVEL), Crc32cCodec()],
        )
    with zipfile.ZipFile(output, "w", compression=zipfile.ZIP_STORED) as archive:  # type: ignore[call-overload]
        for key, value in sorted(metadata.items()):
            archive.writestr(zipfile.ZipInfo(key, date_time=_ZIP_EPOCH), value.to_bytes())
        for name, data in sorted(arrays.items()):
            for number, chunk in enumerate(chunks(data, padded=True)):
                frame = zstd.compress(chunk, _LEVEL)
                stored = frame + google_crc32c.value(frame).to_bytes(_CRC_BYTES, "little")
                key = f"{name}/c/{number}" + "/0" * (data.ndim - 1)
                archive.writestr(zipfile.ZipInfo(key, date_time=_ZIP_EPOCH), stored)
    file.write(_COMMENT_BYTES + trailer_of(output.crc32))


@dataclass(frozen=True, kw_only=True)
class ArrayLayout:
    """An array's metadata."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    chunk_rows: int


class ZarrFile:
    """The group in an open file. Raises ValueError for other metadata than an array file's, and zipfile's errors."""

    def __init__(self, file: BinaryIO) -> None:
        self._archive = zipfile.ZipFile(file)
        group = json.loads(self._archive.read(_METADATA))
        if not (isinstance(group, dict) and isinstance(group.get("attributes"), dict) and group["zarr_format"] == 3):
            raise ValueError(f"its {_METADATA} is not that of a group of Zarr 3")
        self.attributes: dict[str, Any] = group["attributes"]
        self.arrays = dict[str, ArrayLayout]()
        for key in self._archive.namelist():
            name, _, last = key.rpartition("/")
            if last != _METADATA or not name:
                continue
            metadata = json.loads(self._archive.read(key))
            try:
                shape = tuple(map(int, metadata["shape"]))
                chunk = tuple(map(int, metadata["chunk_grid"]["configuration"]["chunk_shape"]))
                dtype, codecs = np.dtype(str(metadata["data_type"])), [codec["name"] for codec in metadata["codecs"]]
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{key} is not that of an array of a batch ({error})") from error
            whole = [max(size, 1) for size in shape[1:]]
            if codecs != _CODECS or not shape or min(shape) < 0 or chunk[0] < 1 or [*chunk[1:]] != whole:
                raise ValueError(f"{key} has codecs {codecs} and chunks {chunk} for {shape}")
            self.arrays[name] = ArrayLayout(shape=shape, dtype=dtype, chunk_rows=chunk[0])

    def rows(
        self, name: str, runs: Sequence[tuple[int, int]] | None = None, digests: Sequence[str] | None = None
    ) -> NDArray[Any]:
        """Return the rows of array `name` in each of the ascending `runs` (start, stop), by default all. Chunks are
        compared with `digests`, one SHA-256 per chunk. Raises ValueError for a difference or a run outside."""
        layout, num_rows = self.arrays[name], 0
        if runs is None:
            runs = [(0, layout.shape[0])]
        for start, stop in runs:
            if not 0 <= start <= stop <= layout.shape[0]:
                raise ValueError(f"{name} has {layout.shape[0]} rows, asked are those of {list(runs)[:4]}")
            num_rows += stop - start
        found = np.empty((num_rows, *layout.shape[1:]), layout.dtype)
        done, last, chunk = 0, -1, found
        for start, stop in runs if found.size else ():
            for place in range(start // layout.chunk_rows, -(-stop // layout.chunk_rows)):
                if place != last:
                    last, chunk = place, self._chunk(name, layout, place, digests)
                first = place * layout.chunk_rows
                part = chunk[max(start - first, 0) : stop - first]
                found[done : done + len(part)] = part
                done += len(part)
        return found

    def _chunk(self, name: str, layout: ArrayLayout, place: int, digests: Sequence[str] | None) -> NDArray[Any]:
        stored = self._archive.read(f"{name}/c/{place}" + "/0" * (len(layout.shape) - 1))
        frame = stored[:-_CRC_BYTES]
        if google_crc32c.value(frame) != int.from_bytes(stored[-_CRC_BYTES:], "little"):
            raise ValueError(f"the checksum of chunk {place} of {name} differs")
        raw: bytes = zstd.decompress(frame)
        row_bytes = layout.dtype.itemsize * math.prod(layout.shape[1:])
        if len(raw) != layout.chunk_rows * row_bytes:
            raise ValueError(f"{name} has a chunk {place} of another size")
        if digests is not None:
            real = min(layout.chunk_rows, layout.shape[0] - place * layout.chunk_rows) * row_bytes
            if hashlib.sha256(memoryview(raw)[:real]).hexdigest() != digests[place]:
                raise ValueError(f"content digest differs: chunk {place} of {name} is foreign")
        return np.frombuffer(raw, layout.dtype.newbyteorder("<")).reshape(layout.chunk_rows, *layout.shape[1:])


def open_zarr_zip(path: Path) -> ZarrFile:
    """Read a file into memory and verify its checksum. Raises ValueError for a difference, and as ZarrFile."""
    return ZarrFile(io.BytesIO(_checked(path)))


def _checked(path: Path) -> bytes:
    data = read_if_it_ends(path, b"crc32 ", TRAILER_BYTES, _NOT_SEALED)
    if data[-TRAILER_BYTES - 2 :] != _COMMENT_BYTES + trailer_of(zlib.crc32(memoryview(data)[: -TRAILER_BYTES - 2])):
        raise ValueError("its checksum differs")
    return data


@contextmanager
def seek_zarr_zip(path: Path) -> Iterator[ZarrFile]:
    """Open a file for partial reads: chunks need digests, since the checksum is not compared. Raises as ZarrFile."""
    with open_regular(path) as file:
        file.seek(max(0, file.seek(0, io.SEEK_END) - TRAILER_BYTES))
        if TRAILER.fullmatch(file.read(TRAILER_BYTES)) is None:
            raise ValueError(_NOT_SEALED)
        yield ZarrFile(file)


@contextmanager
def damage_as(path: Path, kind: type[StoreError], remedy: str) -> Iterator[None]:
    """Raise `kind` for damage found in the block. A failure of the machine is raised as OSError, and a bug (another
    error than of decoding, over unchanged bytes) as it is: a library's new version must not cost a run its batches."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        if (failure := machine_failure(error)) is not None:
            raise failure from None
        if not isinstance(error, _DECODING):
            with suppress(OSError, ValueError):
                _checked(path)
                raise
        raise kind(f"{path} fails its checks ({one_line(error, 300) or type(error).__name__}); {remedy}") from error
