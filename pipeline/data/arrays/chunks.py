"""How the arrays of a file are cut into chunks: finely enough that a rank reads its share, coarsely enough that a small
file has one chunk an array.

Arrays are cut along their first axis alone, which counts samples or tokens. So a chunk is a contiguous piece of the
array's memory, and neighboring samples lie in neighboring chunks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

PIECES = 256
"""Chunks of a large array. Whoever reads a contiguous part of it reads one chunk too much, in the mean: 1/256 of it."""
LEAST_BYTES = 64 << 10
"""Of a chunk that is not the only one: below it, what a chunk costs by itself is more than what it saves."""


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
