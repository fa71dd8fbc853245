"""Rows of Parquet and Arrow files, of every kind of column that is read, and what is said of the others."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.tasks.rows import read_rows

MESSAGE = [("role", pa.string_view()), ("content", pa.string_view())]
TEXT = pa.string()
NAMED = pa.dictionary(pa.int32(), TEXT)


def parquet(path: Path, **columns: pa.Array) -> Path:
    plain = {name: column.cast(TEXT) if column.type == NAMED else column for name, column in columns.items()}
    pq.write_table(pa.table(plain), path, compression="zstd", dictionary_pagesize_limit=1 << 30)
    return path


def arrow(path: Path, **columns: pa.Array) -> Path:
    table = pa.table(columns)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return path


def test_texts_of_every_kind_are_read(tmp_path: Path) -> None:
    columns = dict(
        text=pa.array(["a", None, "c"]),
        large=pa.array(["a", "b", "c"], pa.large_string()),
        number=pa.array([1, 2, None]),
        messages=pa.array([[dict(role="user", content="é")], [], None]),
        pair=pa.array([["a", "b"], None, ["c", "d"]], pa.list_(TEXT, 2)),
        record=pa.array([dict(value=1), None, dict(value=None)]),
        json=pa.array(["{}", None, "1"], pa.json_() if hasattr(pa, "json_") else TEXT),
        price=pa.array([Decimal("1.50"), None, Decimal("2.00")]),
    )
    of_polars = dict(
        view=pa.array(["é" * 40, None, "c"], pa.string_view()),
        lists=pa.array([["a" * 40], None, []], pa.large_list(pa.string_view())),
        messages=pa.array([[dict(role="user", content="b" * 40)], None, []], pa.large_list(pa.struct(MESSAGE))),
    )
    for path, written in (
        (parquet(tmp_path / "d.parquet", **columns), columns),
        (arrow(tmp_path / "d.arrow", **columns), columns),
        (arrow(tmp_path / "p.arrow", **of_polars), of_polars),
    ):
        assert [row.values for row in read_rows(path)] == pa.table(written).to_pylist()
