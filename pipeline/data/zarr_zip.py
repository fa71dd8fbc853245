"""Arrays and attributes as one zipped Zarr v3 group: what every file of arrays of a run is.

Chunks are compressed and carry a crc32c. The comment of the zip file is a crc32 of all bytes before the comment's
length, so that headers, names and padding are covered too. Before anything is unpacked it is compared what the
metadata claim: every chunk is there, none is larger than its array, and all arrays together are not larger than such
a file can hold. Zarr would otherwise make arrays of any size, out of fill values.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.storage import MemoryStore

from pipeline.data.integrity.regular import read_if_it_ends
from pipeline.data.integrity.sealed import TRAILER, TRAILER_BYTES, trailer

MAX_RATIO = 256
"""Bytes of arrays for each byte of the file, at most, beyond SMALL_BYTES. Real batches have 2 to 10."""
SMALL_BYTES = 64 << 20
_CHUNK_ELEMENTS = 1 << 20
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)
_END_OF_ZIP, _END_BYTES = b"PK\5\6", 18
_METADATA = "zarr.json"
_METADATA_BYTES = 16 << 20
_CODECS = ["bytes", "zstd", "crc32c"]


def write_zarr_zip(file: BinaryIO, attributes: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write the sealed group into an open file; `attributes` are JSON.

    The same content gives the same bytes: keys are sorted and the dates are constant.
    """
    content: dict[str, Buffer] = {}
    group = zarr.create_group(MemoryStore(content), zarr_format=3, attributes=dict(attributes))
    for name, data in arrays.items():
        group.create_array(
            name,
            data=np.asarray(data),
            chunks=tuple(min(max(size, 1), _CHUNK_ELEMENTS) for size in data.shape),
            compressors=[ZstdCodec(level=1), Crc32cCodec()],
            config={"write_empty_chunks": True},
        )
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", compression=zipfile.ZIP_STORED) as archive:
        for key, value in sorted(content.items()):
            archive.writestr(zipfile.ZipInfo(key, date_time=_ZIP_EPOCH), value.to_bytes())
    file.write(sealed_zip(memory.getbuffer()))


def sealed_zip(data: bytes | memoryview) -> bytes:
    """A zip file without comment, with its checksum for one."""
    whole = memoryview(data)[:-2]  # the last field is the length of the comment
    return b"".join((whole, _comment(whole)))


def _comment(whole: memoryview) -> bytes:
    return TRAILER_BYTES.to_bytes(2, "little") + trailer(whole)


def open_zarr_zip(path: Path) -> tuple[zarr.Group, bool]:
    """The group of a file, in memory, and whether the file is sealed: those of older schemas are not.

    Raises ValueError when its checksum differs or its arrays claim more than MAX_RATIO allows, and what zipfile raises
    for a file that is none.
    """
    endings, most = (b"crc32 ", _END_OF_ZIP), len(_END_OF_ZIP) + _END_BYTES
    data = read_if_it_ends(path, endings, most, "File is not a zip file: it does not end as one")
    sealed = TRAILER.search(data[-TRAILER_BYTES:]) is not None
    if sealed and data[-TRAILER_BYTES - 2 :] != _comment(memoryview(data)[: -TRAILER_BYTES - 2]):
        raise ValueError("its checksum differs")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        _check_members(members, len(data))
        content = {member.filename: archive.read(member) for member in members}
    _check_arrays(content, SMALL_BYTES + MAX_RATIO * len(data), complete=sealed)
    to_buffer = default_buffer_prototype().buffer.from_bytes
    store = MemoryStore({name: to_buffer(value) for name, value in content.items()}, read_only=True)
    return zarr.open_group(store, mode="r", zarr_format=3), sealed


def _check_members(members: list[zipfile.ZipInfo], num_bytes: int) -> None:
    """Before anything is read: nothing is compressed by zip, and no byte of the file is listed twice."""
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError("a member is compressed by zip, expected none")
    if sum(member.file_size for member in members) > num_bytes:
        raise ValueError("its members claim more bytes than it has")
    if len({member.filename for member in members}) != len(members):
        raise ValueError("two members have one name")


def _check_arrays(content: Mapping[str, bytes], limit: int, *, complete: bool) -> None:
    """Before anything is allocated. Raises ValueError. Files of older schemas are not `complete`: they lack the chunks
    that are all zero."""
    claimed = 0
    for key, value in content.items():
        name, _, last = key.rpartition("/")
        if last != _METADATA:
            continue
        if len(value) > _METADATA_BYTES:
            raise ValueError(f"{key} has {len(value)} bytes, expected at most {_METADATA_BYTES}")
        if name:
            claimed += _check_array(name, json.loads(value), content, limit - claimed, complete=complete)


def _check_array(name: str, metadata: Any, content: Mapping[str, bytes], limit: int, *, complete: bool) -> int:
    """Bytes of one array, whose chunks are all of the size that its metadata say."""
    try:
        shape = _sizes(metadata["shape"])
        chunk = _sizes(metadata["chunk_grid"]["configuration"]["chunk_shape"])
        width = np.dtype(str(metadata["data_type"])).itemsize
        codecs = [codec["name"] for codec in metadata["codecs"]]
        if metadata["chunk_key_encoding"] != {"name": "default", "configuration": {"separator": "/"}}:
            raise ValueError("its chunks have other names")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name}/{_METADATA} is not that of an array of a batch ({error})") from error
    if codecs != _CODECS or len(chunk) != len(shape):
        raise ValueError(f"{name} has codecs {codecs} and chunks {chunk} for {shape}, expected {_CODECS}")
    if any(not 1 <= part <= max(size, 1) for part, size in zip(chunk, shape, strict=True)):
        raise ValueError(f"{name} has chunks {chunk} for {shape}")
    num_bytes = width * math.prod(shape)
    if num_bytes > limit:
        raise ValueError(f"{name} claims {num_bytes} bytes, {limit} are left for a file of this size")
    for place in _chunk_places(shape, chunk):
        stored = content.get("/".join((name, "c", *map(str, place))))
        if stored is None and complete:
            raise ValueError(f"{name} lacks its chunk {list(place)}")
        if stored is not None and _frame_bytes(stored) not in (None, width * math.prod(chunk)):
            raise ValueError(f"{name} has a chunk {list(place)} of another size")
    return num_bytes


def _chunk_places(shape: tuple[int, ...], chunk: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
    """Lazily: as many as there are chunks, of which the first that is missing ends the search."""
    return product(*(range(-(-size // part)) for size, part in zip(shape, chunk, strict=True)))


def _sizes(values: Any) -> tuple[int, ...]:
    sizes = tuple(values)
    if not all(type(size) is int and 0 <= size < 1 << 48 for size in sizes) or len(sizes) > 8:
        raise ValueError(f"sizes {str(sizes)[:80]}")
    return sizes


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
