"""Reads every file of a run directory and compares it with its checksum, whatever it is for.

    checkpoints/000012/   COMMIT                     policy/000012/, model/   SHA256SUMS
    metrics/, events/, spans/  every line            *.npy, *.zarr.zip        behind the content
    all others            as a sealed text

`FREE` lists the files that have none: nothing goes by them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline.data.arrays.zarr_reader import open_zarr_zip
from pipeline.data.event_log import read_lines
from pipeline.data.files import is_temporary
from pipeline.data.integrity.folders import CHECKSUMS, verify_folder
from pipeline.data.integrity.sealed import read_sealed, read_sealed_array, reason
from pipeline.errors import EvenKeelError, StoreError

FREE = {
    r"logs/.*": "text for people; a fatal note that is damaged is passed over",
    r".*\.(html|png|md)": "pages and figures for people, made anew at will",
    r"epochs/supervisor/ALIVE": "compared with itself a second later, its content means nothing",
    r"engines/starting/.*": "links to a policy's files, which are checked there",
    r"(.*/)?skipped/\d{6,}": "empty: the name says all",
    r"(mismatch|trace)\.json": "a result for people, made anew at will",
    r"damaged/.*": "set aside by `evenkeel repair`",
    r"exports/.*": "what `evenkeel export` wrote for another tool, in that tool's format",
}
"""Pattern of a file's name in the run directory → why no bit of it matters."""
_FREE = re.compile("|".join(f"(?:{pattern})" for pattern in FREE))
_REMEDY = "put back a copy, or see what `evenkeel repair` can do"


def is_free(name: str) -> bool:
    """Whether nothing goes by the file with this name in a run directory, or it is not complete yet."""
    return _FREE.fullmatch(name) is not None or any(is_temporary(part) for part in Path(name).parts)


def damaged_files(run: Path, check_checkpoint: Callable[[Path], None]) -> list[str]:
    """One line for each file that is not as it was written, by name. `check_checkpoint` raises for a checkpoint's
    folder (pipeline.trainer.checkpoints.verify). What is replaced meanwhile is read as it then is."""
    found = []
    for check, path in _checks(run, check_checkpoint):
        try:
            check(path)
        except (EvenKeelError, OSError) as error:
            if path.exists():  # or else it was deleted since it was listed, as old policies are
                found.append(reason(error))
    return found


def _checks(run: Path, check_checkpoint: Callable[[Path], None]) -> Iterator[tuple[Callable[[Path], object], Path]]:
    listed: set[Path] = set()
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if is_free(name) or listed & set(path.parents):
            continue
        if path.is_dir():
            if (path / "COMMIT").exists():
                listed.add(path)
                yield check_checkpoint, path
            elif (path / CHECKSUMS).exists():
                yield _check_folder, path
        elif not (path.parent / CHECKSUMS).exists():
            yield _check_file, path


def _check_folder(folder: Path) -> None:
    verify_folder(folder, _REMEDY)
    names = {line.partition("  ")[2] for line in read_sealed(folder / CHECKSUMS, _REMEDY).splitlines()}
    for path in folder.iterdir():
        if path.is_file() and path.name not in (*names, CHECKSUMS) and not is_temporary(path.name):
            read_sealed(path, _REMEDY)


def _check_file(path: Path) -> None:
    if path.suffix == ".jsonl":
        damage: list[str] = []
        for _ in read_lines(path, damage):
            pass
        if damage:
            raise StoreError(damage[0])
    elif path.suffix == ".npy":
        read_sealed_array(path, _REMEDY)
    elif path.name.endswith(".zarr.zip"):
        check_zip(path)
    else:
        read_sealed(path, _REMEDY)


def check_zip(path: Path) -> None:
    """Raises StoreError unless a file of arrays is as it was written."""
    try:
        open_zarr_zip(path)
    except OSError:
        raise
    except Exception as error:
        raise StoreError(f"{path} is damaged ({reason(error)}); {_REMEDY}") from error
