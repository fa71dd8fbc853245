"""Checkpoints are folders that count only once their COMMIT is there.

The learner writes its shards; then the size and SHA-256 of every file go into COMMIT, written last and atomically. A
folder without COMMIT is the remains of a crash and is ignored; one whose files no longer match is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.data.files import fsync_directory, write_atomically
from pipeline.data.run_directory import numbered, numbered_folders
from pipeline.errors import CorruptCheckpointError
from pipeline.ports.learner import Learner

COMMIT = "COMMIT"
_LOOP_STATE = "loop_state.json"


@dataclass(frozen=True)
class Checkpoints:
    """The `checkpoints/` folder of a run; keeps the newest `keep`."""

    directory: Path
    keep: int

    def save(self, learner: Learner, step: int, state: Mapping[str, float]) -> None:
        """Collective. Once it returns on rank zero, training can go on at `step`, whatever dies. `state` is what the
        loop itself must remember."""
        target = self.directory / numbered(step)
        if learner.is_rank_zero:
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
        learner.barrier()
        learner.save(target)
        learner.barrier()
        if learner.is_rank_zero:
            write_atomically(target / _LOOP_STATE, json.dumps(dict(state)) + "\n")
            commit(target, step)
            for old in self._committed()[: -self.keep]:
                shutil.rmtree(self.directory / numbered(old))

    def restore(self, learner: Learner) -> tuple[int, dict[str, float]]:
        """Collective. Load the newest committed checkpoint; returns the step to go on at (0 when there is none) and the
        state of the loop that was saved with it."""
        committed = self._committed()
        if not committed:
            return 0, {}
        folder = self.directory / numbered(committed[-1])
        if learner.is_rank_zero:
            verify(folder)
        learner.barrier()
        learner.load(folder)
        state = folder / _LOOP_STATE
        return committed[-1], json.loads(state.read_text()) if state.exists() else {}

    def _committed(self) -> list[int]:
        return [
            step for step in numbered_folders(self.directory) if (self.directory / numbered(step) / COMMIT).exists()
        ]


def commit(folder: Path, step: int) -> None:
    """Mark a complete checkpoint folder."""
    files = {str(file.relative_to(folder)): _fingerprint(file) for file in _files(folder)}
    for inner in {folder, *(file.parent for file in _files(folder))}:
        fsync_directory(inner)
    write_atomically(folder / COMMIT, json.dumps(dict(step=step, files=files), indent=1) + "\n")


def verify(folder: Path) -> None:
    """Check every file against COMMIT. Raises CorruptCheckpointError naming the first that differs."""
    files: dict[str, Any] = json.loads((folder / COMMIT).read_text())["files"]
    for name, expected in files.items():
        file = folder / name
        found = _fingerprint(file) if file.is_file() else None
        if found != expected:
            raise CorruptCheckpointError(
                f"{file} does not match its checkpoint's COMMIT ({'missing' if found is None else 'changed'}); "
                f"remove {folder} to go on from the checkpoint before it"
            )


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file() and file.name != COMMIT)


def _fingerprint(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        return dict(bytes=file.stat().st_size, sha256=hashlib.file_digest(stream, "sha256").hexdigest())
