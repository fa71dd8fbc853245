"""A quick encoding of batches: Zarr takes 40 ms for what simulations of 40 ms need ten times.

Only the bytes differ. What the store checks when it reads (arrays, digest, that they agree) is the product's own.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from pipeline.data.checksums import trailer_of
from pipeline.data.zarr_zip import ArrayLayout, chunk_digests, chunk_rows


class QuickFile:
    """Stands for ZarrFile."""

    def __init__(self, path: Path) -> None:
        head, _, body = Path(path).read_bytes().partition(b"\n")
        described = json.loads(head)
        self.attributes: dict[str, Any] = described["attributes"]
        self.arrays: dict[str, ArrayLayout] = {}
        self._values: dict[str, NDArray[Any]] = {}
        place = 0
        for name, dtype, shape, size in described["arrays"]:
            part = body[place : place + size]
            if len(part) != size:
                raise ValueError(f"array {name} is cut off")
            values = self._values[name] = np.frombuffer(part, dtype).reshape(shape).copy()
            rows = chunk_rows(values.shape, values.dtype)
            self.arrays[name] = ArrayLayout(shape=values.shape, dtype=values.dtype, chunk_rows=rows)
            place += size

    def rows(
        self, name: str, runs: Sequence[tuple[int, int]] | None = None, digests: Sequence[str] | None = None
    ) -> NDArray[Any]:
        whole = self._values[name]
        if digests is not None and chunk_digests(whole) != list(digests):
            raise ValueError(f"content digest differs: {name}")
        return whole if runs is None else np.concatenate([whole[:0], *(whole[start:stop] for start, stop in runs)])


def write_quickly(file: BinaryIO, attributes: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Stands for write_zarr_zip."""
    rows = {name: np.ascontiguousarray(values) for name, values in arrays.items()}
    described = [(name, row.dtype.str, row.shape, row.nbytes) for name, row in rows.items()]
    content = json.dumps(dict(attributes=attributes, arrays=described)).encode() + b"\n"
    content += b"".join(row.tobytes() for row in rows.values())
    file.write(content + trailer_of(zlib.crc32(content)))  # the store tells batches apart by it


@contextmanager
def quick_files() -> Iterator[None]:
    """While the block runs, the store writes and reads this encoding."""
    with (
        patch("pipeline.data.store.write_zarr_zip", write_quickly),
        patch("pipeline.data.store.open_zarr_zip", QuickFile),
        patch("pipeline.data.store.seek_zarr_zip", lambda path: nullcontext(QuickFile(path))),
    ):
        yield
