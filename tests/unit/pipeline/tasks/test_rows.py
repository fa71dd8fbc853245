"""Rows of Parquet and Arrow files, of every kind of column that is read, and what is said of the others."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.task_sections import DataTask
from pipeline.errors import RecipeError
from pipeline.tasks.data import problem_of
from pipeline.tasks.rows import read_rows

MESSAGE = [("role", pa.string_view()), ("content", pa.string_view())]
LONG = "x" * (4 << 20)
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


def test_columns_that_hold_bytes_are_not_read_and_named(tmp_path: Path) -> None:
    image = pa.array([dict(bytes=b"x", path="p")])
    [row] = read_rows(arrow(tmp_path / "d.arrow", prompt=pa.array(["a"]), image=image, picture=pa.array([b"x"])))
    assert (row.values, list(row.unread)) == (dict(prompt="a"), ["image", "picture"])
    section = DataTask(name="data", path=tmp_path / "d.arrow", columns=dict(answer="picture"))
    with pytest.raises(RecipeError, match=r"picture is nothing.*keys found: prompt; not read: image \(.*\), picture"):
        problem_of(row, section)
