"""Write and read the files of arrays of a run: each is one zipped Zarr v3 group, sealed.

Arrays are cut along their first axis alone, which counts samples or tokens: finely enough that a rank reads its share,
coarsely enough that a small file has one chunk an array. A chunk is a contiguous piece of the array's memory. Chunks
are compressed and carry a crc32c. The comment of the zip file is a crc32 of all bytes before the comment's length, so
that headers, names and padding are covered too. Writing holds one chunk in memory at a time.

A part of a file is found by seeking, and nothing else is read. Zarr would make arrays of any size out of fill values,
so it is compared beforehand that every chunk is there, and that the arrays are not larger than such a file can hold.
Each chunk that is read is compared with its crc32c, and with its digest where the caller has one.
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
from contextlib import contextmanager
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

MAX_RATIO = 256
"""Bytes of arrays for each byte of the file, at most, beyond SMALL_BYTES: readers allocate no more, whatever a file
claims. Real batches have 2 to 10. A file whose arrays are packed closer is padded."""
SMALL_BYTES = 64 << 20
PIECES = 256
"""Chunks of a large array. Whoever reads a contiguous part of it reads one chunk too much, in the mean: 1/256 of it."""
LEAST_BYTES = 64 << 10
"""Of a chunk that is not the only one: below it, what a chunk costs by itself is more than what it saves."""
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)
_LEVEL = 1
_NOT_SEALED = "it does not end in its checksum"
_METADATA = "zarr.json"
_METADATA_BYTES = 16 << 20
_CODECS = ["bytes", "zstd", "crc32c"]
_CRC_BYTES = 4
_DECODING = (
    ValueError,
    LookupError,
    EOFError,
    OverflowError,
    RecursionError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
)
"""What bytes can make a reader raise."""


def chunk_rows(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> int:
    """Rows of the first axis in each chunk of an array with at least one axis."""
    row_bytes = dtype.itemsize * math.prod(shape[1:])
    wanted = max(-(-shape[0] // PIECES), -(-LEAST_BYTES // max(row_bytes, 1)))
    return min(max(shape[0], 1), wanted)


def chunk_digests(array: NDArray[np.generic]) -> list[str]:
    """The SHA-256 of each chunk's raw little-endian bytes, in order; the last one is not padded."""
    return [hashlib.sha256(chunk.data).hexdigest() for chunk in chunks(array)]


def chunks(array: NDArray[np.generic], *, padded: bool = False) -> Iterator[NDArray[np.uint8]]:
    """The raw little-endian bytes of each chunk, in order: views of the array where they can be. The last one has as
    many as the others where it is `padded`, by zeros."""
    rows = chunk_rows(array.shape, array.dtype)
    chunk_bytes = rows * array.dtype.itemsize * math.prod(array.shape[1:])
    for start in range(0, len(array) if array.size else 0, rows):
        part = np.ascontiguousarray(array[start : start + rows], array.dtype.newbyteorder("<"))
        found = part.reshape(-1).view(np.uint8)
        missing = chunk_bytes - len(found)
        yield np.pad(found, (0, missing)) if padded and missing else found


def write_zarr_zip(file: BinaryIO, attributes: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write the sealed group into an open file; `attributes` are JSON.

    The same content gives the same bytes: keys have an order, and the dates are constant.
    """
    output = _SealedOutput(file)
    with zipfile.ZipFile(output, "w", compression=zipfile.ZIP_STORED) as archive:  # type: ignore[call-overload]
        written = 0
        for key, value in _members(attributes, arrays):
            archive.writestr(zipfile.ZipInfo(key, date_time=_ZIP_EPOCH), value)
            written += len(value)
        least = -(-(sum(array.nbytes for array in arrays.values()) - SMALL_BYTES) // MAX_RATIO)
        if written < least:
            archive.writestr(zipfile.ZipInfo(_padding_key(arrays), date_time=_ZIP_EPOCH), bytes(least - written))
    output.seal()


def _members(attributes: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Iterator[tuple[str, bytes]]:
    """Names and contents. The metadata are Zarr's own; chunks are encoded here as Zarr would, which has an event loop
    and several copies for each."""
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
    yield from ((key, value.to_bytes()) for key, value in sorted(metadata.items()))
    for name, data in sorted(arrays.items()):
        for number, chunk in enumerate(chunks(data, padded=True)):
            frame = zstd.compress(chunk, _LEVEL)
            key = "/".join((name, "c", str(number), *"0" * (data.ndim - 1)))
            yield key, frame + google_crc32c.value(frame).to_bytes(4, "little")


def _padding_key(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Within an array, where Zarr looks for chunks of other names alone."""
    return f"{min(arrays)}/padding"


class _SealedOutput:
    """What zipfile writes to. It cannot be sought in, so every byte comes once and in its place."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._crc32 = 0
        self._last = b""
        """The last two bytes so far: at the end of a zip file, the length of its comment."""

    def write(self, data: bytes) -> int:
        whole = self._last + data
        body, self._last = whole[:-2], whole[-2:]
        self._crc32 = zlib.crc32(body, self._crc32)
        self._file.write(body)
        return len(data)

    def flush(self) -> None:
        self._file.flush()

    def seal(self) -> None:
        """The file is complete but for its comment."""
        self._file.write(_comment(self._crc32))


def sealed_zip(data: bytes | memoryview) -> bytes:
    """A zip file without comment, with its checksum for one."""
    whole = memoryview(data)[:-2]  # the last field is the length of the comment
    return b"".join((whole, zip_comment(whole)))


def zip_comment(whole: memoryview) -> bytes:
    """What ends a sealed zip file, of which `whole` is all before it: a comment's length, and the comment."""
    return _comment(zlib.crc32(whole))


def _comment(crc32: int) -> bytes:
    return TRAILER_BYTES.to_bytes(2, "little") + trailer_of(crc32)


@dataclass(frozen=True, kw_only=True)
class ArrayLayout:
    """What the metadata of an array say."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    chunk_rows: int
    """Rows of the first axis in a chunk."""

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.shape[1:]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def num_chunks(self) -> int:
        return 0 if 0 in self.shape else -(-self.shape[0] // self.chunk_rows)

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.row_shape)


class ZarrFile:
    """The group in an open file. Raises ValueError when its arrays claim more than MAX_RATIO allows, and what zipfile
    raises for a file that is none."""

    def __init__(self, file: BinaryIO, num_bytes: int) -> None:
        """`file` has `num_bytes`."""
        self._archive = zipfile.ZipFile(file)
        members = self._archive.infolist()
        _check_members(members, num_bytes)
        names = {member.filename for member in members}
        self.arrays: dict[str, ArrayLayout] = {}
        self.attributes: dict[str, Any] = self._group_attributes()
        left = SMALL_BYTES + MAX_RATIO * num_bytes
        for key in sorted(names):
            name, _, last = key.rpartition("/")
            if last != _METADATA or not name:
                continue
            layout = _layout(name, self._metadata(key))
            if layout.num_bytes > left:
                raise ValueError(f"{name} claims {layout.num_bytes} bytes, {left} are left for a file of this size")
            left -= layout.num_bytes
            for place in range(layout.num_chunks):  # lazily: the first that is missing ends it
                if _chunk_key(name, layout, place) not in names:
                    raise ValueError(f"{name} lacks its chunk {place}")
            self.arrays[name] = layout

    def rows(self, name: str, runs: Sequence[tuple[int, int]], digests: Sequence[str] | None = None) -> NDArray[Any]:
        """The rows of array `name` from start to stop of each of `runs`, ascending, one run after another. The SHA-256
        of each chunk that holds any of them is compared with that of `digests`, one a chunk. Raises ValueError when one
        differs, or a run is not within the array."""
        layout = self.arrays[name]
        if any(not 0 <= start <= stop <= layout.shape[0] for start, stop in runs):
            raise ValueError(f"{name} has {layout.shape[0]} rows, asked are those of {list(runs)[:4]}")
        found = np.empty((sum(stop - start for start, stop in runs), *layout.row_shape), layout.dtype)
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

    def whole(self, name: str, digests: Sequence[str] | None = None) -> NDArray[Any]:
        """All of an array; see `rows`."""
        return self.rows(name, [(0, self.arrays[name].shape[0])], digests)

    def _chunk(self, name: str, layout: ArrayLayout, place: int, digests: Sequence[str] | None) -> NDArray[Any]:
        stored = self._archive.read(_chunk_key(name, layout, place))
        raw = _unpacked(name, place, stored, layout.chunk_rows * layout.row_bytes)
        if digests is not None:
            real = min(layout.chunk_rows, layout.shape[0] - place * layout.chunk_rows) * layout.row_bytes
            if hashlib.sha256(memoryview(raw)[:real]).hexdigest() != digests[place]:
                raise ValueError(f"content digest differs: chunk {place} of {name} is foreign")
        return np.frombuffer(raw, layout.dtype.newbyteorder("<")).reshape(layout.chunk_rows, *layout.row_shape)

    def _metadata(self, key: str) -> Any:
        size = self._archive.getinfo(key).file_size
        if size > _METADATA_BYTES:
            raise ValueError(f"{key} has {size} bytes, expected at most {_METADATA_BYTES}")
        return json.loads(self._archive.read(key))

    def _group_attributes(self) -> dict[str, Any]:
        group = self._metadata(_METADATA)
        if group["node_type"] != "group" or group["zarr_format"] != 3 or not isinstance(group["attributes"], dict):
            raise ValueError(f"its {_METADATA} is not that of a group of Zarr 3")
        return dict(group["attributes"])


def open_zarr_zip(path: Path) -> ZarrFile:
    """A file, read into memory and compared with its checksum. Raises ValueError when that differs, and as ZarrFile."""
    data = _checked(path)
    return ZarrFile(io.BytesIO(data), len(data))


def _checked(path: Path) -> bytes:
    data = read_if_it_ends(path, b"crc32 ", TRAILER_BYTES, _NOT_SEALED)
    if data[-TRAILER_BYTES - 2 :] != zip_comment(memoryview(data)[: -TRAILER_BYTES - 2]):
        raise ValueError("its checksum differs")
    return data


@contextmanager
def damage_said(path: Path, kind: type[StoreError], remedy: str) -> Iterator[None]:
    """Raise `kind`, around the reading of a file, for what is damage. A failure of the machine is none, and is raised
    as OSError. Neither is an error of the software: whatever is no error of decoding, over bytes that are as they were
    written, is raised as it is. A new version of a library must not cost a run its batches."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        if (failure := machine_failure(error)) is not None:
            raise failure from None
        if not isinstance(error, _DECODING) and _is_as_written(path):
            raise
        raise kind(f"{path} fails its checks ({one_line(error, 300) or type(error).__name__}); {remedy}") from error


def _is_as_written(path: Path) -> bool:
    try:
        _checked(path)
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def seek_zarr_zip(path: Path) -> Iterator[ZarrFile]:
    """A file of which only what is asked for is read. Its checksum, which is of all bytes, is not compared: what is
    read must have digests. Raises as ZarrFile."""
    with open_regular(path) as file:
        num_bytes = file.seek(0, io.SEEK_END)
        file.seek(max(0, num_bytes - TRAILER_BYTES))
        if TRAILER.fullmatch(file.read(TRAILER_BYTES)) is None:
            raise ValueError(_NOT_SEALED)
        yield ZarrFile(file, num_bytes)


def _check_members(members: list[zipfile.ZipInfo], num_bytes: int) -> None:
    """Before anything is read: nothing is compressed by zip, and no byte of the file is listed twice."""
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError("a member is compressed by zip, expected none")
    if sum(member.file_size for member in members) > num_bytes:
        raise ValueError("its members claim more bytes than it has")
    if len({member.filename for member in members}) != len(members):
        raise ValueError("two members have one name")


def _layout(name: str, metadata: Any) -> ArrayLayout:
    """Raises ValueError for metadata that no file of arrays has."""
    try:
        shape = _sizes(metadata["shape"])
        chunk = _sizes(metadata["chunk_grid"]["configuration"]["chunk_shape"])
        dtype = np.dtype(str(metadata["data_type"]))
        codecs = [codec["name"] for codec in metadata["codecs"]]
        if metadata["chunk_key_encoding"] != {"name": "default", "configuration": {"separator": "/"}}:
            raise ValueError("its chunks have other names")
        if metadata["fill_value"] != 0 or dtype.kind not in "biuf":
            raise ValueError(f"it holds {dtype}, filled with {str(metadata['fill_value'])[:20]}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name}/{_METADATA} is not that of an array of a batch ({error})") from error
    if codecs != _CODECS or len(chunk) != len(shape) or not shape:
        raise ValueError(f"{name} has codecs {codecs} and chunks {chunk} for {shape}, expected {_CODECS}")
    whole = tuple(max(size, 1) for size in shape)
    if not 1 <= chunk[0] <= whole[0] or chunk[1:] != whole[1:]:
        raise ValueError(f"{name} has chunks {chunk} for {shape}")
    return ArrayLayout(shape=shape, dtype=dtype, chunk_rows=chunk[0])


def _sizes(values: Any) -> tuple[int, ...]:
    sizes = tuple(values)
    if not all(type(size) is int and 0 <= size < 1 << 48 for size in sizes) or len(sizes) > 8:
        raise ValueError(f"sizes {str(sizes)[:80]}")
    return sizes


def _chunk_key(name: str, layout: ArrayLayout, place: int) -> str:
    return "/".join((name, "c", str(place), *["0"] * len(layout.row_shape)))


def _unpacked(name: str, place: int, stored: bytes, num_bytes: int) -> bytes:
    """The raw bytes of a chunk of `num_bytes`. Raises ValueError, before anything is allocated for them."""
    frame = stored[:-_CRC_BYTES]
    if google_crc32c.value(frame) != int.from_bytes(stored[-_CRC_BYTES:], "little"):
        raise ValueError(f"the checksum of chunk {place} of {name} differs")
    if _frame_bytes(frame) != num_bytes:
        raise ValueError(f"{name} has a chunk {place} of another size")
    raw: bytes = zstd.decompress(frame)
    if len(raw) != num_bytes:
        raise ValueError(f"{name} has a chunk {place} of another size")
    return raw


def _frame_bytes(frame: bytes) -> int | None:
    """How many bytes a zstd frame says that it holds (RFC 8878, 3.1.1.1): the decoder allocates as many. None where it
    does not say."""
    if len(frame) < 6 or frame[:4] != b"\x28\xb5\x2f\xfd":
        raise ValueError("a chunk is no zstd frame")
    descriptor = frame[4]
    size_flag, single = descriptor >> 6, bool(descriptor & 0x20)
    width = (int(single), 2, 4, 8)[size_flag]
    start = 5 + (not single) + (0, 1, 2, 4)[descriptor & 3]
    if not width:
        return None
    return int.from_bytes(frame[start : start + width], "little") + (256 if width == 2 else 0)
