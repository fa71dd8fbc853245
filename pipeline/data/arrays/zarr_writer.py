"""Arrays and attributes as one zipped Zarr v3 group: what every file of arrays of a run is.

Chunks (pipeline.data.arrays.chunks) are compressed and carry a crc32c. The comment of the zip file is a crc32 of all
bytes before the comment's length, so that headers, names and padding are covered too.

Memory holds one chunk at a time: each is compressed, counted into the checksum, and given to the file.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import google_crc32c
import zarr
from numcodecs import zstd
from numpy.typing import NDArray
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.core.buffer import Buffer
from zarr.storage import MemoryStore

from pipeline.data.arrays.chunks import chunk_rows, chunks
from pipeline.data.integrity.sealed import TRAILER_BYTES, trailer_of

MAX_RATIO = 256
"""Bytes of arrays for each byte of the file, at most, beyond SMALL_BYTES: readers allocate no more, whatever a file
claims. Real batches have 2 to 10. A file whose arrays are packed closer is padded."""
SMALL_BYTES = 64 << 20
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)
_LEVEL = 1


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
