"""JSON Lines: one object a line."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pipeline.errors import RecipeError
from pipeline.tasks.rows.row import MOST_BYTES, Row
from precision.text import JsonError, parse_json


def json_rows(path: Path) -> Iterator[Row]:
    """All lines, blank ones skipped. Raises RecipeError naming file and line."""
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file, path), 1):
            if line.strip(b" \t\r\n"):
                yield _parse(line, f"{path}, line {number}")


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Lines end with \\n alone. A file without line ends is not read into memory as one."""
    number = 0
    while line := file.readline(MOST_BYTES + 1):
        number += 1
        if len(line) > MOST_BYTES:
            raise RecipeError(
                f"{path}, line {number}: longer than {MOST_BYTES >> 20} MiB; no context holds such a prompt: see "
                "whether the file has line ends"
            )
        yield line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def _parse(line: bytes, where: str) -> Row:
    try:
        values = parse_json(line.rstrip(b"\r\n"))
    except JsonError as error:
        raise RecipeError(f"{where}: {error}; write one object a line") from None
    if not isinstance(values, dict):
        raise RecipeError(f'{where}: a {type(values).__name__}, expected an object {{"prompt": …, "answer": …}}')
    return Row(where, values)
