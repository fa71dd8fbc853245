"""Rows of the files that people have: JSON Lines, Parquet, and folders that Hugging Face datasets saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import RecipeError
from pipeline.tasks.rows.arrow import ARROW_MAGIC, PARQUET_MAGIC, arrow_rows
from pipeline.tasks.rows.json_lines import json_rows
from pipeline.tasks.rows.row import Row
from pipeline.tasks.rows.saved_folders import data_files, refusing_unreadable
from precision.text.short import one_line

_COMPRESSED = {b"\x1f\x8b": "gunzip", b"(\xb5/\xfd": "unzstd", b"PK\x03\x04": "unzip"}


def read_rows(path: Path) -> Iterator[Row]:
    """All rows, in the order of the data. Raises RecipeError that names file and row."""
    with refusing_unreadable(path):
        for file in data_files(path):
            yield from _rows_of_file(file)


def _rows_of_file(path: Path) -> Iterator[Row]:
    """What a file is, its first bytes say, not its name."""
    with path.open("rb") as file:
        first = file.read(len(ARROW_MAGIC))
    if first.startswith(PARQUET_MAGIC) or first.startswith(ARROW_MAGIC) or path.suffix == ".arrow":
        return arrow_rows(path)
    for magic, remedy in _COMPRESSED.items():
        if first.startswith(magic):
            raise RecipeError(f"{one_line(path, 200)} is compressed; {remedy} it")
    return json_rows(path)
