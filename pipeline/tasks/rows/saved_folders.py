"""Which files of a folder hold its rows: what `Dataset.save_to_disk` of Hugging Face datasets wrote, or Parquet."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.errors import RecipeError
from precision.text import JsonError, listed, one_line, parse_object, quoted

_SHARD = re.compile(r"-\d+-of-\d+$")
_MOST_BYTES = 16 << 20


@contextmanager
def refusing_unreadable(path: Path) -> Iterator[None]:
    """An OSError as a RecipeError."""
    try:
        yield
    except OSError as error:
        raise RecipeError(
            f"cannot read {one_line(path, 200)}: {error.strerror}; set task.path to a JSON Lines file, a Parquet file "
            "or a folder of Hugging Face datasets"
        ) from error


def data_files(path: Path) -> list[Path]:
    """The files, in order: the path itself where it is no folder; of FOLDER/train, where there is no such file, the
    Parquet files of that split. Raises RecipeError for a folder of several splits or of something else, and OSError."""
    if not path.is_dir():
        if not path.is_file():
            if files := [file for file in sorted(path.parent.glob("*.parquet")) if _split(file) == path.name]:
                return files
            path.stat()
            raise RecipeError(f"{one_line(path, 200)} is not a file; set task.path to a file, or a folder of datasets")
        return [path]
    if (path / "state.json").is_file():
        return _saved(path)
    if (path / "dataset_dict.json").is_file():
        splits = _object(path / "dataset_dict.json").get("splits")
        names = [str(name) for name in splits] if isinstance(splits, list) else []
        raise _several(path, names)
    files = sorted(path.glob("*.parquet"))
    splits = sorted({_split(file) for file in files})
    if len(splits) > 1 and not all(split.isdigit() for split in splits):
        raise _several(path, splits)
    if not files:
        raise RecipeError(
            f"{one_line(path, 200)} is not a file, and as a folder it holds neither state.json (of save_to_disk) nor "
            "*.parquet; set task.path to the data"
        )
    return files


def _saved(path: Path) -> list[Path]:
    """The Arrow files that `state.json` names."""
    entries = _object(path / "state.json").get("_data_files")
    names = [one.get("filename") for one in entries if isinstance(one, dict)] if isinstance(entries, list) else []
    files: list[Path] = []
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise RecipeError(f"{path}/state.json names {quoted(name)}, expected a file beside it; save it again")
        files.append(path / name)
    if not files:
        raise RecipeError(f"{path}/state.json names no data files; save the dataset again by save_to_disk")
    return files


def _split(file: Path) -> str:
    """`train` of train-00000-of-00003.parquet."""
    return _SHARD.sub("", file.stem)


def _several(path: Path, names: list[str]) -> RecipeError:
    folder, named = one_line(path, 200), listed([one_line(name, 60) for name in names], between=", ")
    one = "train" if "train" in names else one_line(names[0] if names else "SPLIT", 60)
    return RecipeError(
        f"{folder} holds several splits ({named}); set task.path to one of them, as in {folder}/{one}, and "
        "task.held_out_path to another"
    )


def _object(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise RecipeError(f"{path} has more than {_MOST_BYTES >> 20} MiB; save the dataset again by save_to_disk")
        return parse_object(path.read_bytes())
    except JsonError as error:
        raise RecipeError(f"{path} is damaged: {error}; save the dataset again by save_to_disk") from None
