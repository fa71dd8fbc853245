"""Arrays and attributes as one zipped Zarr v3 group: what every file of arrays of a run is.

Chunks (pipeline.data.arrays.chunks) are compressed and carry a crc32c. The comment of the zip file is a crc32 of all
bytes before the comment's length, so that headers, names and padding are covered too.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.core.buffer import Buffer
from zarr.storage import MemoryStore

from pipeline.data.arrays.chunks import chunk_rows
from pipeline.data.integrity.sealed import TRAILER_BYTES, trailer

_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)


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
            chunks=(chunk_rows(data.shape, data.dtype), *(max(size, 1) for size in data.shape[1:])),
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
    return b"".join((whole, zip_comment(whole)))


def zip_comment(whole: memoryview) -> bytes:
    """What ends a sealed zip file, of which `whole` is all before it: a comment's length, and the comment."""
    return TRAILER_BYTES.to_bytes(2, "little") + trailer(whole)
