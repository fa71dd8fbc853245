"""RUN-replay/replay.json: of which run a folder is the replay.

    made by `evenkeel train --replay`, before anything else is in the folder; replaced once the run has got further
    read by the next replay of a run, which touches no folder without it and none of another run

A run is known by the files of its recipes and the checksums of its batches. One that was extended begins with what it
was before.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.data.files import is_temporary, make_folder
from pipeline.data.frozen.recipes import all_recipes
from pipeline.data.integrity.sealed import create_sealed, read_sealed_json, write_sealed_json
from pipeline.data.store import BatchStore
from pipeline.errors import RunConflictError, StoreError

_ADVICE = "rename or remove it, then give the command again"


@dataclass(frozen=True)
class Replayed:
    """What a replay goes by."""

    recipes: tuple[str, ...]
    """SHA-256 of the file of each recipe, in order."""
    batches: tuple[str, ...]
    """The checksum of each batch, in order."""

    @staticmethod
    def of(run: Path) -> Replayed:
        """Of a run as it is now. Raises StoreError, and CorruptBatchError for a batch that does not end in its
        checksum."""
        recipes, store = all_recipes(run), BatchStore(run / "batches")
        steps = recipes[-1].recipe.run.steps
        return Replayed(
            tuple(one.sha256 for one in recipes),
            tuple(store.checksum(index) for index in store.settled() if index < steps),
        )

    def refuse_another(self, folder: Path) -> None:
        """Raises RunConflictError for a folder that holds anything but a replay of this run as it is or was, and
        StoreError where its record is damaged."""
        path = _file(folder)
        if path.exists():
            if difference := self._difference(_read(path)):
                raise RunConflictError(f"{folder} is the replay of another run ({difference} differs); {_ADVICE}")
        elif os.path.lexists(folder) and not (folder.is_dir() and all(map(is_temporary, os.listdir(folder)))):
            raise RunConflictError(f"{folder} is not a replay: it has no {path.name}; {_ADVICE}")

    def begin(self, folder: Path) -> None:
        """Make a folder the replay of this run. Raises as `refuse_another` does."""
        self.refuse_another(folder)
        make_folder(folder)
        with suppress(FileExistsError):
            create_sealed(_file(folder), json.dumps(asdict(self)) + "\n")
        self.refuse_another(folder)  # another process may have been first

    def go_on(self, folder: Path) -> None:
        """The folder's replay learns from what the run has by now, too."""
        if _read(_file(folder)) != self:
            write_sealed_json(_file(folder), asdict(self))

    def _difference(self, earlier: Replayed) -> str | None:
        """What of an earlier state this one does not begin with."""
        for kind, before, now in (
            ("recipe", earlier.recipes, self.recipes),
            ("batch", earlier.batches, self.batches),
        ):
            for index, one in enumerate(before):
                if now[index : index + 1] != (one,):
                    return f"{kind} {index}"
        return None


def _file(folder: Path) -> Path:
    return folder / "replay.json"


def _read(path: Path) -> Replayed:
    fields = read_sealed_json(path, f"put back a copy, or rename or remove {path.parent}")
    try:
        return Replayed(tuple(fields["recipes"]), tuple(fields["batches"]))
    except (KeyError, TypeError) as error:
        raise StoreError(f"{path} is damaged ({error!r}); {_ADVICE}") from error
