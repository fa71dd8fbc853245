"""Read rows of the files that people have: JSON Lines, Parquet, and folders that Hugging Face datasets saved.

pyarrow reads Parquet and the Arrow files of datasets. Columns of bytes (pictures) are not read.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import RecipeError
from pipeline.importing import pip_install
from precision.text import JsonError, listed, one_line, parse_json, parse_object, quoted

_ROWS_AT_ONCE = 1024
_PARQUET_MAGIC, _ARROW_MAGIC = b"PAR1", b"ARROW1"
_LOOKED_AT = 4096
"""Bytes at the beginning of a file that show its kind."""
_CSV_HEADER = re.compile(rb'[\w. "-]+(,[\w. "-]+)+\r?(\n|\Z)')
_COMPRESSED = {
    **{b"\x1f\x8b": "gunzip", b"(\xb5/\xfd": "unzstd", b"PK\x03\x04": "unzip"},
    **{b"BZh": "bunzip2", b"\xfd7zXZ": "unxz", b"\x04\x22\x4d\x18": "unlz4"},
}
_LFS_POINTER = b"version https://git-lfs"
_SHARD = re.compile(r"-\d+-of-\d+$")
"""Suffix of a shard: train-00000-of-00003.parquet belongs to the split train."""
_BYTES = re.compile(r"\bbinary\b(?!:)")
"""Mark of pyarrow's types that are or hold bytes, in their names."""


@dataclass(frozen=True)
class Row:
    """A row's values by column, and its place, for messages."""

    where: str
    values: Mapping[str, Any]
    unread: Mapping[str, str] = field(default_factory=dict)
    """Columns that are not read → their type."""


def read_rows(path: Path) -> Iterator[Row]:
    """Yield all rows in order. Raises RecipeError that names file and row, and for data without a row."""
    empty = True
    with refusing_unreadable(path):
        for file in data_files(path):
            for row in _rows_of_file(file):
                empty = False
                yield row
    if empty:
        raise RecipeError(f"{one_line(path, 200)} holds no rows; see whether it was written to its end")


def _rows_of_file(path: Path) -> Iterator[Row]:
    """Return the rows of a file; its first bytes, not its name, show its kind. Raises RecipeError for CSV, a JSON array
    and compressed files, with the command that converts them."""
    with path.open("rb") as file:
        first = file.read(_LOOKED_AT)
    if first.startswith((_PARQUET_MAGIC, _ARROW_MAGIC)) or path.suffix == ".arrow":
        return arrow_rows(path)
    named, rows = one_line(path, 200), f"{one_line(path.stem, 100)}-rows.jsonl"
    for magic, remedy in _COMPRESSED.items():
        if first.startswith(magic):
            raise RecipeError(f"{named} is compressed; {remedy} it")
    if first.startswith(_LFS_POINTER):
        raise RecipeError(f"{named} is only a pointer to the file; call `git lfs pull` in its folder")
    first = first.removeprefix(codecs.BOM_UTF8).lstrip()
    if first.startswith(b"["):
        raise RecipeError(
            f"{named} is a JSON array, expected one object a line; `jq -c '.[]' {named} > {rows}` makes it"
        )
    if _CSV_HEADER.match(first):
        code = "import csv, json, sys; [print(json.dumps(row)) for row in csv.DictReader(sys.stdin)]"
        raise RecipeError(
            f'{named} is CSV, expected one JSON object a line; `python -c "{code}" < {named} > {rows}` makes it'
        )
    return json_rows(path)


def json_rows(path: Path) -> Iterator[Row]:
    """Yield the object on each line; skip blank lines. Raises RecipeError naming file and line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not line.strip(b" \t\r\n"):
                continue
            try:
                values = parse_json(line.rstrip(b"\r\n"))
            except JsonError as error:
                raise RecipeError(f"{where}: {error}; write one object a line") from None
            if not isinstance(values, dict):
                kind = type(values).__name__
                raise RecipeError(f'{where}: a {kind}, expected an object {{"prompt": …, "answer": …}}')
            yield Row(where, values)


def arrow_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a Parquet or Arrow file. Raises RecipeError naming the file, also where there is no pyarrow."""
    try:
        import pyarrow as pa
    except ImportError:
        raise RecipeError(
            f"{one_line(path, 200)} is read by pyarrow, which this machine has not; {pip_install('pyarrow')}, or "
            "write the data as JSON Lines"
        ) from None
    number, unread = 0, dict[str, str]()
    try:
        for batch in _batches(path, unread):
            for first in range(0, batch.num_rows, _ROWS_AT_ONCE):
                part = batch.slice(first, _ROWS_AT_ONCE)
                # Read 32-bit floats as the numbers of their shortest digits: Python would read 0.1 as
                # 0.10000000149011612.
                kinds = part.schema
                if any(_with_floats(kind, pa.string()) != kind for kind in kinds.types):
                    for floats in (pa.string(), pa.float64()):
                        part = part.cast(pa.schema([one.with_type(_with_floats(one.type, floats)) for one in kinds]))
                for values in part.to_pylist():
                    number += 1
                    yield Row(f"{path}, row {number}", values, unread)
    except (pa.ArrowException, ValueError) as error:  # ValueError: text that is not UTF-8
        raise RecipeError(
            f"{one_line(path, 200)} is damaged after row {number}: {one_line(error, 200)}; copy it again"
        ) from error


def _batches(path: Path, unread: dict[str, str]) -> Iterator[Any]:
    """Yield record batches without the columns that are not read, which are noted in `unread`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with path.open("rb") as file:
        first = file.read(len(_ARROW_MAGIC))
    if first.startswith(_PARQUET_MAGIC):
        with pq.ParquetFile(path) as parquet:
            yield from parquet.iter_batches(_ROWS_AT_ONCE, columns=_readable(parquet.schema_arrow, unread))
        return
    with pa.OSFile(str(path)) as source:
        if first.startswith(_ARROW_MAGIC):
            found = pa.ipc.open_file(source)
            batches = (found.get_batch(index) for index in range(found.num_record_batches))
        else:
            found = batches = pa.ipc.open_stream(source)
        columns = _readable(found.schema, unread)
        for batch in batches:
            yield batch.select(columns)


def _with_floats(kind: Any, floats: Any) -> Any:
    """Return a type with `floats` in place of 32-bit floats, in objects, lists and dictionaries too."""
    from pyarrow import list_, struct, types

    if types.is_float32(kind):
        return floats
    if types.is_dictionary(kind) and types.is_float32(kind.value_type):
        return floats
    if types.is_list(kind) and _with_floats(kind.value_type, floats) != kind.value_type:
        return list_(_with_floats(kind.value_type, floats))
    if types.is_struct(kind) and any(_with_floats(one.type, floats) != one.type for one in kind):
        return struct([one.with_type(_with_floats(one.type, floats)) for one in kind])
    return kind


def _readable(schema: Any, unread: dict[str, str]) -> list[str]:
    """Return the columns to read, and add the types of the others, which hold bytes, to `unread`."""
    unread |= {column.name: str(column.type) for column in schema if _BYTES.search(str(column.type))}
    return [column.name for column in schema if column.name not in unread]


@contextmanager
def refusing_unreadable(path: Path) -> Iterator[None]:
    """Raise RecipeError in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise RecipeError(
            f"cannot read {one_line(path, 200)}: {error.strerror}; set task.path to a JSON Lines file, a Parquet file "
            "or a folder of Hugging Face datasets"
        ) from error


def data_files(path: Path) -> list[Path]:
    """Return the data files of a path, in order: the path itself if it is a file; a split's Parquet files for
    FOLDER/train. Raises OSError, and RecipeError for a folder with several splits or without data."""
    if not path.is_dir():
        if not path.is_file():
            if files := [
                file for file in sorted(path.parent.glob("*.parquet")) if _SHARD.sub("", file.stem) == path.name
            ]:
                return files
            path.stat()
            raise RecipeError(f"{one_line(path, 200)} is not a file; set task.path to a file, or a folder of datasets")
        return [path]
    if (path / "state.json").is_file():  # names the Arrow files
        entries = _object(path / "state.json").get("_data_files")
        saved: list[Path] = []
        for entry in entries if isinstance(entries, list) else []:
            name = entry.get("filename") if isinstance(entry, dict) else entry
            if not isinstance(name, str) or Path(name).name != name:
                raise RecipeError(f"{path}/state.json names {quoted(name)}, expected a file beside it; save it again")
            saved.append(path / name)
        if not saved:
            raise RecipeError(f"{path}/state.json names no data files; save the dataset again by save_to_disk")
        return saved
    if (path / "dataset_dict.json").is_file():
        splits = _object(path / "dataset_dict.json").get("splits")
        names = [str(name) for name in splits] if isinstance(splits, list) else []
        raise _several(path, names)
    files = sorted(path.glob("*.parquet"))
    splits = sorted({_SHARD.sub("", file.stem) for file in files})
    if len(splits) > 1 and not all(split.isdigit() for split in splits):
        raise _several(path, splits)
    if not files:
        raise RecipeError(
            f"{one_line(path, 200)} is not a file, and as a folder it holds neither state.json (of save_to_disk) nor "
            "*.parquet; set task.path to the data"
        )
    return files


def _several(path: Path, names: list[str]) -> RecipeError:
    folder, named = one_line(path, 200), listed([one_line(name, 60) for name in names], between=", ")
    one = "train" if "train" in names else one_line(names[0] if names else "SPLIT", 60)
    return RecipeError(
        f"{folder} holds several splits ({named}); set task.path to one of them, as in {folder}/{one}, and "
        "task.held_out_path to another"
    )


def _object(path: Path) -> dict[str, Any]:
    try:
        return parse_object(path.read_bytes())
    except JsonError as error:
        raise RecipeError(f"{path} is damaged: {error}; save the dataset again by save_to_disk") from None
