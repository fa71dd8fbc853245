"""How much rows of Arrow are as Python objects, before they are made.

A dictionary holds a text once that every row may name, and compression makes a thousand times fewer bytes of it: of a
file of a kilobyte came gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.tasks.rows.row import MOST_BYTES

_ROWS_AT_ONCE = 1024
_POINTER_BYTES = 8


def pieces(batch: Any) -> Iterator[Any]:
    """The record batch as pieces that become few Python objects at once: MOST_BYTES, or a single row."""
    if batch.num_rows <= 1 or (batch.num_rows <= _ROWS_AT_ONCE and num_bytes(batch) <= MOST_BYTES):
        yield batch
        return
    half = batch.num_rows // 2
    yield from pieces(batch.slice(0, half))
    yield from pieces(batch.slice(half))


def num_bytes(rows: Any) -> int:
    """Of a record batch: its values where they stand, with a pointer to each."""
    return sum(_num_bytes(column) for column in rows.columns)


def _num_bytes(array: Any) -> int:
    import pyarrow.compute as pc
    from pyarrow import types

    kind, own = array.type, _POINTER_BYTES * len(array)
    if types.is_dictionary(kind):
        return own + (pc.sum(pc.take(_lengths(array.dictionary), array.indices)).as_py() or 0)
    if types.is_string_view(kind):
        return own + int(_view_lengths(array).sum())
    parts = _parts(array)
    return own + (int(array.nbytes) if parts is None else sum(map(_num_bytes, parts)))


def _lengths(texts: Any) -> Any:
    """Bytes of each value of a dictionary; where it holds lists and the like, of all together."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import types

    if types.is_string_view(texts.type):
        return pa.array(_view_lengths(texts))
    if types.is_string(texts.type) or types.is_large_string(texts.type):
        return pc.binary_length(texts).cast(pa.int64())
    each = _num_bytes(texts) if _parts(texts) is not None or types.is_dictionary(texts.type) else _POINTER_BYTES
    return pa.array([each] * len(texts), pa.int64())


def _view_lengths(texts: Any) -> NDArray[np.int64]:
    """Bytes of each text. Views are 16 bytes, a length first; many may be of one text."""
    views = np.frombuffer(texts.buffers()[1], np.int32)[4 * texts.offset :: 4][: len(texts)]
    return views.astype(np.int64)


def rows_at_once(parquet: Any, group: int, columns: list[str]) -> int:
    """How many rows of a row group to read at once: few where its dictionaries hold long texts, since a batch may hold
    the longest for each value. `parquet` reads texts as dictionaries. Of lists the mean number of values counts, and
    those that are empty in the first row are not looked at."""
    import pyarrow.compute as pc

    first = next(parquet.iter_batches(1, row_groups=[group], columns=columns), None)
    if first is None:
        return _ROWS_AT_ONCE
    about = parquet.metadata.row_group(group)
    values = max(int(about.column(index).num_values) for index in range(about.num_columns))
    longest = sum(int(pc.max(_lengths(one)).as_py() or 0) for column in first.columns for one in _dictionaries(column))
    return max(1, min(_ROWS_AT_ONCE, 2 * MOST_BYTES * int(about.num_rows) // max(1, longest * values)))


def _dictionaries(array: Any) -> Iterator[Any]:
    from pyarrow import types

    if types.is_dictionary(array.type):
        yield array.dictionary
    for part in _parts(array) or ():
        yield from _dictionaries(part)


def _parts(array: Any) -> list[Any] | None:
    """What a nested array holds, as far as its rows reach; None of another."""
    from pyarrow import BaseExtensionType, types

    if isinstance(array.type, BaseExtensionType):
        return [array.storage]
    if types.is_struct(array.type):
        return list(array.flatten())
    if types.is_map(array.type):
        begin, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
        return [part.slice(begin, end - begin) for part in (array.keys, array.items)]
    return [array.flatten()] if types.is_nested(array.type) else None
