"""Rows of a small file take little memory, however much the file says that they are."""

from __future__ import annotations

import tracemalloc
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import RecipeError
from pipeline.tasks.rows import read_rows
from pipeline.tasks.rows.row import MOST_BYTES

LONG = "x" * (4 << 20)
TEXT = pa.string()
NAMED = pa.dictionary(pa.int32(), TEXT)


def repeated(text: str, rows: int) -> pa.Array:
    """A column of rows that all name one text, which is held once."""
    return pa.DictionaryArray.from_arrays(pa.array([1] * rows, pa.int32()), pa.array(["", text]))


def lists_of(column: pa.Array, width: int) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(range(0, len(column) + 1, width), pa.int32()), column)


def parquet(path: Path, **columns: pa.Array) -> Path:
    plain = {name: column.cast(TEXT) if column.type == NAMED else column for name, column in columns.items()}
    pq.write_table(pa.table(plain), path, compression="zstd", dictionary_pagesize_limit=1 << 30)
    return path


def arrow(path: Path, **columns: pa.Array) -> Path:
    table = pa.table(columns)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return path


def peaks(path: Path, rows: int) -> tuple[int, int]:
    """Bytes of Python objects, and of Arrow's, while the rows are read and dropped."""
    most = 0
    tracemalloc.start()
    try:
        before, count = pa.total_allocated_bytes(), 0
        for row in read_rows(path):
            count += 1
            del row
            most = max(most, pa.total_allocated_bytes() - before)
        assert count == rows
        return tracemalloc.get_traced_memory()[1], most
    finally:
        tracemalloc.stop()


def test_a_text_that_many_rows_of_parquet_name_is_not_in_memory_for_each(tmp_path: Path) -> None:
    path = parquet(tmp_path / "d.parquet", prompt=repeated(LONG, 64), answer=pa.array(["1"] * 64))
    assert path.stat().st_size < 2000
    python, arrows = peaks(path, 64)
    assert python < 2 * MOST_BYTES
    assert arrows < 8 * MOST_BYTES


@pytest.mark.parametrize("inside", [False, True])
def test_nor_for_each_of_an_arrow_file(tmp_path: Path, inside: bool) -> None:
    column = lists_of(repeated(LONG, 128), 2) if inside else repeated(LONG, 64)
    python, arrows = peaks(arrow(tmp_path / "d.arrow", prompt=column), 64)
    assert python < 2 * MOST_BYTES
    assert arrows < 2 * MOST_BYTES


@pytest.mark.parametrize(
    "column",
    [
        repeated("x" * (MOST_BYTES + 1), 2),
        lists_of(repeated(LONG, 20), 10),
        lists_of(pa.nulls(2 * (MOST_BYTES // 8)), MOST_BYTES // 8),
        pa.array([[dict(content=LONG)] * 5] * 2),
        pa.array([[("key", LONG)] * 5] * 2, pa.map_(TEXT, TEXT)),
    ],
    ids=["one text", "a list", "nulls", "messages", "a map"],
)
def test_a_row_has_a_longest_size_as_a_line_has(tmp_path: Path, column: pa.Array) -> None:
    small = pa.nulls(1, column.type)
    path = arrow(tmp_path / "d.arrow", prompt=pa.chunked_array([small, column]))
    rows = read_rows(path)
    assert next(rows).values == dict(prompt=None)
    with pytest.raises(RecipeError, match=r"d\.arrow, row 2: longer than 16 MiB; no context holds such a prompt"):
        next(rows)


def test_what_a_dictionary_holds_beside_a_row_is_no_part_of_it(tmp_path: Path) -> None:
    kinds = pa.array([f"{number}{LONG}" for number in range(5)])
    column = pa.DictionaryArray.from_arrays(pa.array([4, None, 0], pa.int32()), kinds)
    assert len(list(read_rows(arrow(tmp_path / "d.arrow", prompt=column)))) == 3
    ages = pa.DictionaryArray.from_arrays(pa.array([1, 0], pa.int32()), pa.array([5, 7]))
    assert [row.values["age"] for row in read_rows(arrow(tmp_path / "ages.arrow", age=ages))] == [7, 5]


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
    expected = pa.table(columns).to_pylist()
    for path in (parquet(tmp_path / "d.parquet", **columns), arrow(tmp_path / "d.arrow", **columns)):
        assert [row.values for row in read_rows(path)] == expected


@pytest.mark.skipif(not hasattr(pa, "string_view"), reason="this pyarrow has no views")
def test_columns_that_may_hold_one_text_many_times_are_not_read(tmp_path: Path) -> None:
    """A few bytes each, all of which may name one long text."""
    path = arrow(tmp_path / "d.arrow", prompt=pa.array(["a"]), seen=pa.array(["b"], pa.string_view()))
    assert [row.values for row in read_rows(path)] == [dict(prompt="a")]
