"""Parquet files, and the Arrow files of Hugging Face datasets, by pyarrow. Columns of bytes (pictures) are not read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from pipeline.errors import RecipeError
from pipeline.requirements import pip_install
from pipeline.tasks.rows.row import Row
from precision.text.short import one_line

PARQUET_MAGIC = b"PAR1"
ARROW_MAGIC = b"ARROW1"
_ROWS_AT_ONCE = 1024


def arrow_rows(path: Path) -> Iterator[Row]:
    """All rows. Raises RecipeError naming the file, also where there is no pyarrow."""
    try:
        import pyarrow as pa
    except ImportError:
        raise RecipeError(
            f"{one_line(path, 200)} is read by pyarrow, which this machine has not; {pip_install('pyarrow')}, or "
            "write the data as JSON Lines"
        ) from None
    number = 0
    try:
        for batch in _batches(path):
            for values in batch.to_pylist():
                number += 1
                yield Row(f"{path}, row {number}", values)
    except (pa.ArrowException, ValueError) as error:  # ValueError: text that is not UTF-8
        raise RecipeError(
            f"{one_line(path, 200)} is damaged after row {number}: {one_line(error, 200)}; copy it again"
        ) from error


def _batches(path: Path) -> Iterator[Any]:
    """Record batches without the columns that hold bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with path.open("rb") as file:
        first = file.read(len(ARROW_MAGIC))
    if first.startswith(PARQUET_MAGIC):
        with closing(pq.ParquetFile(path)) as parquet:
            yield from parquet.iter_batches(_ROWS_AT_ONCE, columns=_readable(parquet.schema_arrow))
        return
    with pa.OSFile(str(path)) as source:
        if first.startswith(ARROW_MAGIC):
            found = pa.ipc.open_file(source)
            batches = (found.get_batch(index) for index in range(found.num_record_batches))
        else:
            found = batches = pa.ipc.open_stream(source)
        columns = _readable(found.schema)
        for batch in batches:
            yield from _slices(batch.select(columns))


def _slices(batch: Any) -> Iterator[Any]:
    """A batch as pieces that become few Python objects at once."""
    for first in range(0, batch.num_rows, _ROWS_AT_ONCE):
        yield batch.slice(first, _ROWS_AT_ONCE)


def _readable(schema: Any) -> list[str]:
    return [column.name for column in schema if not _holds_bytes(column.type)]


def _holds_bytes(kind: Any) -> bool:
    from pyarrow import types

    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return True
    return any(_holds_bytes(kind.field(index).type) for index in range(kind.num_fields))
