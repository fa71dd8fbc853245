"""Checkpoints are folders that get their name when they are complete.

    .000012.HOST-RANDOM.tmp   every rank writes its shards; rank 0 adds the loop's state, then COMMIT: the size and
                              SHA-256 of every file
    000012                    the same folder, moved onto a name that must be free

Of two learners that save one step, one a superseded one, the first to move its folder wins and the other keeps that. A
folder whose files do not match COMMIT is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.data.files import (
    await_visible,
    fsync_directory,
    move_to_free_name,
    remove_leftovers,
    temporary_name,
    write_atomically,
)
from pipeline.data.run_directory import numbered, numbered_folders, unfenced
from pipeline.errors import CorruptCheckpointError
from pipeline.ports.learner import Learner

COMMIT = "COMMIT"
_LOOP_STATE = "loop_state.json"
_FILES_AT_ONCE = 8


@dataclass(frozen=True)
class Checkpoints:
    """The `checkpoints/` folder of a run; keeps the newest `keep`."""

    directory: Path
    keep: int
    fence: Callable[[], None] = unfenced
    """Called on rank 0 before a checkpoint gets its name; raises SupersededError."""

    def save(self, learner: Learner, step: int, state: Mapping[str, float]) -> None:
        """Collective. Once it returns, training can go on at `step`, whatever dies. `state` is what the loop itself
        must remember."""
        folder = self.directory / learner.tell(lambda: self._new_folder(step))
        learner.save(folder)
        learner.barrier()
        learner.tell(lambda: self._commit(folder, step, state))

    def restore(self, learner: Learner) -> tuple[int, dict[str, float]]:
        """Collective. Load the newest committed checkpoint; returns the step to go on at (0 when there is none) and the
        state of the loop that was saved with it."""
        newest = learner.tell(self._newest)
        if newest is None:
            return 0, {}
        step, state = newest
        folder = self.directory / numbered(step)
        learner.everywhere(lambda: await_visible(folder / COMMIT))
        learner.load(folder)
        return step, state

    def _new_folder(self, step: int) -> str:
        folder = temporary_name(self.directory / numbered(step))
        folder.mkdir(parents=True)
        return folder.name

    def _commit(self, folder: Path, step: int, state: Mapping[str, float]) -> None:
        write_atomically(folder / _LOOP_STATE, json.dumps(dict(state)) + "\n")
        commit(folder, step)
        target = self.directory / numbered(step)
        self.fence()
        if not move_to_free_name(folder, target):
            if (target / COMMIT).exists():
                verify(target)
                shutil.rmtree(folder)
            else:
                _remove(target)
                folder.rename(target)
        for old in self._committed()[: -self.keep]:
            _remove(self.directory / numbered(old))

    def _newest(self) -> tuple[int, dict[str, float]] | None:
        """Step and state of the newest checkpoint, verified."""
        remove_leftovers(self.directory, self.fence)
        committed = self._committed()
        if not committed:
            return None
        folder = self.directory / numbered(committed[-1])
        verify(folder)
        state = folder / _LOOP_STATE
        return committed[-1], json.loads(state.read_text()) if state.exists() else {}

    def _committed(self) -> list[int]:
        return [
            step for step in numbered_folders(self.directory) if (self.directory / numbered(step) / COMMIT).exists()
        ]


def _remove(folder: Path) -> None:
    """Delete a folder that no reader may find half deleted: it loses its name first."""
    aside = temporary_name(folder)
    folder.rename(aside)
    shutil.rmtree(aside)


def commit(folder: Path, step: int) -> None:
    """Mark a complete checkpoint folder."""
    found = _files(folder)
    files = {str(file.relative_to(folder)): value for file, value in zip(found, _fingerprints(found), strict=True)}
    for inner in {folder, *(file.parent for file in found)}:
        fsync_directory(inner)
    write_atomically(folder / COMMIT, json.dumps(dict(step=step, files=files), indent=1) + "\n")


def verify(folder: Path) -> None:
    """Check every file against COMMIT. Raises CorruptCheckpointError naming the first that differs."""
    files: dict[str, Any] = json.loads((folder / COMMIT).read_text())["files"]
    found_files = _fingerprints([folder / name for name in files])
    for (name, expected), found in zip(files.items(), found_files, strict=True):
        file = folder / name
        if found != expected:
            raise CorruptCheckpointError(
                f"{file} does not match its checkpoint's COMMIT ({'missing' if found is None else 'changed'}); "
                f"remove {folder} to go on from the checkpoint before it"
            )


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file() and file.name != COMMIT)


def _fingerprints(files: Sequence[Path]) -> list[dict[str, Any] | None]:
    """Of several files at once: the other ranks wait meanwhile, and a checkpoint may have hundreds of gigabytes."""
    with ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
        return list(threads.map(_fingerprint, files))


def _fingerprint(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    with file.open("rb") as stream:
        return dict(bytes=file.stat().st_size, sha256=hashlib.file_digest(stream, "sha256").hexdigest())
