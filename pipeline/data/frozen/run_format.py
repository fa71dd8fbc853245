"""FORMAT: which layout of a run directory this is.

A run is resumed by the version of Even Keel that has its number. Its records are shown by any that can read them.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from pipeline.data.integrity.regular import read_at_most
from pipeline.data.integrity.sealed import create_sealed, reason, seal, unseal
from pipeline.errors import StoreError

RUN_FORMAT = 5
"""Raise it when recipe keys, metrics or files change their names, so that a run that was begun before cannot go on.
Runs of format 1 have no FORMAT file. Batch files have a schema version of their own (pipeline.data.batch_format)."""

FIRST_SEALED_FORMAT = 5
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
    found = found_format(run)
    if found != RUN_FORMAT:
        raise StoreError(
            f"{run} was made by {_other(found)} version of Even Keel (run format {found}, this version reads "
            f"{RUN_FORMAT}); go on with that version, or start a new run under another run.name. Its batches can "
            "still be read, by pipeline.data.store.BatchStore"
        )


def known_in_part(run: Path) -> str | None:
    """What to say of a run that another version of Even Keel made, before it is shown; None of one of this version, and
    of what is no run."""
    if not os.path.lexists(run / "recipe.yaml") or (found := found_format(run)) == RUN_FORMAT:
        return None
    return (
        f"{run} was made by {_other(found)} version of Even Keel (run format {found}, this version's is {RUN_FORMAT}): "
        "shown is what this one knows"
    )


def _other(found: int) -> str:
    return "an earlier" if found < RUN_FORMAT else "a later"


def is_sealed(run: Path) -> bool:
    """Whether the files of the run end in checksums. A folder of logs that is no run has them."""
    if not os.path.lexists(format_file(run)) and not os.path.lexists(run / "recipe.yaml"):
        return True
    return found_format(run) >= FIRST_SEALED_FORMAT


def found_format(run: Path) -> int:
    """The run's number. Raises StoreError when the file is damaged."""
    path = format_file(run)
    if not os.path.lexists(path):
        return 1
    try:
        data = read_at_most(path, _FORMAT_BYTES)
        if data in [b"%d\n" % number for number in range(2, FIRST_SEALED_FORMAT)]:
            return int(data)
        return int(unseal(data))
    except ValueError as error:
        raise StoreError(
            f"{path} is damaged ({reason(error)}); if this version of Even Keel made the run, write "
            f"{json.dumps(seal(f'{RUN_FORMAT}' + chr(10)))[1:-1]} into it, or else start a new run"
        ) from error
