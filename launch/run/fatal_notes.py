"""Why a process of a run must not be started again: a file of its own in RUN/logs/fatal, for whoever started it."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field

from pipeline import errors
from pipeline.data.checksums import read_sealed_json, write_sealed_json
from pipeline.data.files import unique_suffix
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import FatalError, StoreError


def leave_fatal_note(run: RunDirectory, process: str, error: Exception) -> None:
    """Say why `process` gives up."""
    folder = run.logs / "fatal"
    note = dict(process=process, error=type(error).__name__, message=str(error), time=time.time())
    with suppress(OSError):  # on a full disk: the supervisor finds that out for itself
        folder.mkdir(parents=True, exist_ok=True)
        write_sealed_json(folder / f"{process}-{unique_suffix()}.json", note)


@dataclass
class FatalNotes:
    """The notes that are left from now on: what is there already was left by earlier processes. No clock is asked."""

    run: RunDirectory
    _before: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self._before = frozenset(self._names())

    def message(self, process: str = "") -> str | None:
        """The message of a new note, of the process whose name begins so; None when there is none."""
        error = self.error(process)
        return None if error is None else str(error)

    def error(self, process: str = "") -> FatalError | None:
        """The same as the error that it was."""
        for name in sorted(self._names() - self._before):
            if name.startswith(process):
                try:
                    note = read_sealed_json(self.run.logs / "fatal" / name, "it is only shown")
                    kind, message = getattr(errors, str(note["error"]), None), str(note["message"])
                except (OSError, StoreError, KeyError):
                    continue
                return (kind if isinstance(kind, type) and issubclass(kind, FatalError) else FatalError)(message)
        return None

    def _names(self) -> set[str]:
        folder = self.run.logs / "fatal"
        return {path.name for path in folder.glob("*.json")} if folder.is_dir() else set()
