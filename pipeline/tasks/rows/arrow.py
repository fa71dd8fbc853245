"""Parquet files, and the Arrow files of Hugging Face datasets, by pyarrow. Columns of bytes (pictures) are not read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from pipeline.errors import RecipeError
from pipeline.requirements import pip_install
from pipeline.tasks.rows.row import MOST_BYTES, Row
from pipeline.tasks.rows.sizes import num_bytes, pieces, rows_at_once
from precision.text import one_line

PARQUET_MAGIC = b"PAR1"
ARROW_MAGIC = b"ARROW1"


def arrow_rows(path: Path) -> Iterator[Row]:
    """All rows. Raises RecipeError naming the file, also where there is no pyarrow, and the row that is too long."""
    try:
        import pyarrow as pa
    except ImportError:
        raise RecipeError(
            f"{one_line(path, 200)} is read by pyarrow, which this machine has not; {pip_install('pyarrow')}, or "
            "write the data as JSON Lines"
        ) from None
    number, unread = 0, dict[str, str]()
    try:
        for batch in (piece for whole in _batches(path, unread) for piece in pieces(whole)):
            if num_bytes(batch) > MOST_BYTES:
                raise RecipeError(
                    f"{path}, row {number + 1}: longer than {MOST_BYTES >> 20} MiB; no context holds such a prompt: "
                    "leave it out"
                )
            for values in _in_full(batch).to_pylist():
                number += 1
                yield Row(f"{path}, row {number}", values, unread)
    except (pa.ArrowException, ValueError) as error:  # ValueError: text that is not UTF-8
        raise RecipeError(
            f"{one_line(path, 200)} is damaged after row {number}: {one_line(error, 200)}; copy it again"
        ) from error


def _in_full(batch: Any) -> Any:
    """With floats of 32 bits as the numbers of their shortest digits: Python would read 0.1 as 0.10000000149011612."""
    import pyarrow as pa

    schema = batch.schema
    if any(_with_floats(kind, pa.string()) != kind for kind in schema.types):
        for floats in (pa.string(), pa.float64()):
            batch = batch.cast(pa.schema([one.with_type(_with_floats(one.type, floats)) for one in schema]))
    return batch


def _with_floats(kind: Any, floats: Any) -> Any:
    """A type with `floats` in place of floats of 32 bits, in objects too."""
    from pyarrow import struct, types

    if types.is_float32(kind):
        return floats
    if types.is_struct(kind) and any(_with_floats(one.type, floats) != one.type for one in kind):
        return struct([one.with_type(_with_floats(one.type, floats)) for one in kind])
    return kind


def _batches(path: Path, unread: dict[str, str]) -> Iterator[Any]:
    """Record batches without the columns that are not read, which are noted in `unread`. The file's own batches (of
    Parquet: its pages) are decompressed whole."""
    import pyarrow as pa

    with path.open("rb") as file:
        first = file.read(len(ARROW_MAGIC))
    if first.startswith(PARQUET_MAGIC):
        yield from _parquet_batches(path, unread)
        return
    with pa.OSFile(str(path)) as source:
        if first.startswith(ARROW_MAGIC):
            found = pa.ipc.open_file(source)
            batches = (found.get_batch(index) for index in range(found.num_record_batches))
        else:
            found = batches = pa.ipc.open_stream(source)
        columns = _readable(found.schema, unread)
        for batch in batches:
            yield batch.select(columns)


def _parquet_batches(path: Path, unread: dict[str, str]) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with closing(pq.ParquetFile(path)) as parquet:
        columns, leaves = (
            _readable(parquet.schema_arrow, unread),
            map(parquet.schema.column, range(len(parquet.schema))),
        )
        texts = [
            leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY" and leaf.logical_type.type != "DECIMAL"
        ]
        with closing(pq.ParquetFile(path, read_dictionary=texts)) as compact:
            for group in range(parquet.num_row_groups):
                at_once = rows_at_once(compact, group, columns)
                yield from parquet.iter_batches(at_once, row_groups=[group], columns=columns)


_READ = (
    *("boolean", "integer", "floating", "decimal", "temporal", "null", "string", "large_string", "string_view"),
    *("struct", "list", "large_list", "fixed_size_list", "map"),
)
"""Kinds of columns, as pyarrow.types names them. Not bytes, and not views of lists and runs, which may hold one text
many times."""


def _readable(schema: Any, unread: dict[str, str]) -> list[str]:
    """Columns that are read; the kinds of the others are added to `unread`."""
    unread |= {column.name: str(column.type) for column in schema if not _is_read(column.type)}
    return [column.name for column in schema if column.name not in unread]


def _is_read(kind: Any) -> bool:
    from pyarrow import BaseExtensionType, types

    if isinstance(kind, BaseExtensionType):
        return _is_read(kind.storage_type)
    if types.is_dictionary(kind):
        return _is_read(kind.value_type)
    if not any(getattr(types, f"is_{name}")(kind) for name in _READ):
        return False
    return all(_is_read(kind.field(index).type) for index in range(kind.num_fields))
