"""Arrays and attributes as one zipped Zarr v3 group: what every file of arrays of a run is."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.core.buffer import Buffer
from zarr.storage import MemoryStore

_CHUNK_ELEMENTS = 1 << 20
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)


def write_zarr_zip(file: BinaryIO, attributes: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write the group into an open file; `attributes` are JSON. Chunks are compressed and carry a crc32c.

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
        )
    with zipfile.ZipFile(file, "w", compression=zipfile.ZIP_STORED) as archive:
        for key, value in sorted(content.items()):
            archive.writestr(zipfile.ZipInfo(key, date_time=_ZIP_EPOCH), value.to_bytes())
