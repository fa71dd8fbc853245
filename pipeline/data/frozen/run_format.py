"""FORMAT: which layout of a run directory this is.

A run is read by the version of Even Keel that has its number, and by no other.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from pipeline.data.integrity.regular import read_at_most
from pipeline.data.integrity.sealed import create_sealed, reason, seal, unseal
from pipeline.errors import StoreError

RUN_FORMAT = 7
"""Raise it when recipe keys, metrics or files change their names, so that a run that was begun before cannot go on.
Batch files have a schema version of their own (pipeline.data.batch_format)."""

_FORMAT_BYTES = 1000


def format_file(run: Path) -> Path:
    """Where the number stands."""
    return run / "FORMAT"


def begin_format(run: Path) -> None:
    """Write this version's number, unless one is there."""
    with suppress(FileExistsError):
        create_sealed(format_file(run), f"{RUN_FORMAT}\n")


def check_format(run: Path) -> None:
    """Raises StoreError unless this version of Even Keel made the run, or one with the same RUN_FORMAT."""
    found = _read(format_file(run))
    if found != RUN_FORMAT:
        raise StoreError(
            f"{run} was made by {'an earlier' if found < RUN_FORMAT else 'a later'} version of Even Keel (run format "
            f"{found}, this version reads {RUN_FORMAT}); go on with that version, or start a new run under another "
            "run.name"
        )


def _read(path: Path) -> int:
    """Raises StoreError when the file is missing or damaged."""
    try:
        return int(unseal(read_at_most(path, _FORMAT_BYTES)))
    except FileNotFoundError:
        trouble = "is missing"
    except ValueError as error:
        trouble = f"is damaged ({reason(error)})"
    text = json.dumps(seal(f"{RUN_FORMAT}\n"))[1:-1]
    raise StoreError(
        f"{path} {trouble}; if this version of Even Keel made the run, write {text} into it, or else start a new run"
    )
