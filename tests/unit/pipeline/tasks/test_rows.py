"""Rows of a small file take little memory, however much the file says that they are."""

from __future__ import annotations

import tracemalloc
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.task_sections import DataTask
from pipeline.errors import RecipeError
from pipeline.tasks.columns import problem_of
from pipeline.tasks.rows import read_rows
from pipeline.tasks.rows.row import MOST_BYTES
from pipeline.tasks.rows.sizes import num_bytes

MESSAGE = [("role", pa.string_view()), ("content", pa.string_view())]
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


@pytest.mark.parametrize("rows", [1, 3])
def test_a_text_that_many_views_name_counts_for_each(tmp_path: Path, rows: int) -> None:
    """16 bytes each in the file, and megabytes each as Python objects: a single one is refused as too long."""
    long = pa.array(["a" * (17 << 20)], pa.string_view())
    _, view, text = long.buffers()
    views = pa.Array.from_buffers(pa.string_view(), rows, [None, pa.py_buffer(view.to_pybytes()[:16] * rows), text])
    assert num_bytes(pa.record_batch(dict(prompt=views))) > rows * (17 << 20)
    assert num_bytes(pa.record_batch(dict(prompt=pa.DictionaryArray.from_arrays([0] * rows, long)))) > rows * (17 << 20)
    with pytest.raises(RecipeError, match="row 1: longer than 16 MiB"):
        list(read_rows(arrow(tmp_path / "d.arrow", prompt=views)))


def test_columns_that_may_hold_one_text_many_times_are_not_read_and_named(tmp_path: Path) -> None:
    """A few bytes each, all of which may name one long text."""
    seen = pa.array([["b"]], pa.list_view(pa.string()))
    [row] = read_rows(arrow(tmp_path / "d.arrow", prompt=pa.array(["a"]), seen=seen, picture=pa.array([b"x"])))
    assert (row.values, list(row.unread)) == (dict(prompt="a"), ["seen", "picture"])
    section = DataTask(name="data", path=tmp_path / "d.arrow", columns=dict(answer="seen"))
    with pytest.raises(RecipeError, match=r"seen is nothing.*keys found: prompt; not read: seen \(.*\), picture"):
        problem_of(row, section)
