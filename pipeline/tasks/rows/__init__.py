"""Rows of the files that people have: JSON Lines, Parquet, and folders that Hugging Face datasets saved."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import RecipeError
from pipeline.tasks.rows.arrow import ARROW_MAGIC, PARQUET_MAGIC, arrow_rows
from pipeline.tasks.rows.json_lines import json_rows
from pipeline.tasks.rows.row import Row
from pipeline.tasks.rows.saved_folders import data_files, refusing_unreadable
from precision.text import one_line

_LOOKED_AT = 4096
"""Bytes of the beginning of a text."""
_CSV_HEADER = re.compile(rb'[\w. "-]+(,[\w. "-]+)+\r?(\n|\Z)')
_COMPRESSED = {b"\x1f\x8b": "gunzip", b"(\xb5/\xfd": "unzstd", b"PK\x03\x04": "unzip"}


def read_rows(path: Path) -> Iterator[Row]:
    """All rows, in the order of the data. Raises RecipeError that names file and row, and for data without a row."""
    empty = True
    with refusing_unreadable(path):
        for file in data_files(path):
            for row in _rows_of_file(file):
                empty = False
                yield row
    if empty:
        raise RecipeError(f"{one_line(path, 200)} holds no rows; see whether it was written to its end")


def _rows_of_file(path: Path) -> Iterator[Row]:
    """What a file is, its first bytes say, not its name."""
    with path.open("rb") as file:
        first = file.read(len(ARROW_MAGIC))
    if first.startswith(PARQUET_MAGIC) or first.startswith(ARROW_MAGIC) or path.suffix == ".arrow":
        return arrow_rows(path)
    for magic, remedy in _COMPRESSED.items():
        if first.startswith(magic):
            raise RecipeError(f"{one_line(path, 200)} is compressed; {remedy} it")
    _refuse_other_text(path)
    return json_rows(path)


def _refuse_other_text(path: Path) -> None:
    """Raises RecipeError for text that people have in place of JSON Lines, with the line that makes these of it."""
    with path.open("rb") as file:
        first = file.read(_LOOKED_AT).removeprefix(codecs.BOM_UTF8).lstrip()
    named, rows = one_line(path, 200), f"{one_line(path.stem, 100)}-rows.jsonl"
    if first.startswith(b"["):
        raise RecipeError(
            f"{named} is a JSON array, expected one object a line; `jq -c '.[]' {named} > {rows}` makes it"
        )
    if _CSV_HEADER.match(first):
        code = "import csv, json, sys; [print(json.dumps(row)) for row in csv.DictReader(sys.stdin)]"
        raise RecipeError(
            f'{named} is CSV, expected one JSON object a line; `python -c "{code}" < {named} > {rows}` makes it'
        )
