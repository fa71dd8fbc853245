"""RUN/control/000012.json: what the ESS controller saw of step 12, and what holds from then on.

The record of a step is created exclusively, under the fence, before version step + 1 is published. That is the one
moment at which a decision is made: whoever was killed before has decided nothing, and whoever is started again after it
finds the record and goes by it. So each step is decided once, however often it is trained, and a replay of the run does
what the run did.

    learner     reads the record of the step before its first one, and of every step that it trains again
    collector   reads the record of the newest published version: its lags hold for the batches that it begins
    engines     read the newest record: which of them are to be started again
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from pipeline.data.checksums import create_sealed, read_sealed
from pipeline.data.files import await_visible, make_folder
from pipeline.data.run_directory import numbered, numbered_files
from pipeline.errors import StoreError
from precision.controller.policy import Decision, Evidence, State
from precision.settings import Settings


class ControlRecord(Settings):
    """One step's record. What comes after `decision` follows from the state, for processes that know no ladder."""

    step: int
    evidence: Evidence | None = None
    """None: the step was skipped, as its batch was lost, or a fork begins afresh after it."""
    state: State
    decision: Decision | None = None
    lr_by_age: bool = False
    """Whether the learning rate is lowered by the age of each batch after this step."""
    lags: tuple[tuple[int, int], ...] = ()
    """(first batch, lag), ascending: every lag that was decided so far."""
    promoted: tuple[str, ...] = ()
    """Modules of the recipe's quant map that map `state.quant_map` does not quantize."""
    restarts: Mapping[int, int] = {}
    """Engine → the start of it that is bad: every one that was to be started again so far, the latest start of each."""
    first_seen: Mapping[int, tuple[int, int]] = {}
    """Engine → (its latest start, the step after which that was first announced): its tokens in batches that had begun
    by then may be of the start before."""


@dataclass(frozen=True)
class ControlFiles:
    """The folder `control/` of a run."""

    folder: Path
    fence: Callable[[], None]

    def create(self, record: ControlRecord) -> bool:
        """Keep the record of a step for ever. Returns whether it is this one; False: there was one already."""
        self.fence()
        make_folder(self.folder)
        try:
            create_sealed(self._path(record.step), record.model_dump_json() + "\n")
        except FileExistsError:
            return False
        return True

    def read(self, step: int) -> ControlRecord | None:
        """Return the record of a step; None where there is none. Raises StoreError when it is damaged."""
        path = self._path(step)
        if not path.exists():
            return None
        remedy = f"`evenkeel repair {self.folder.parent}` goes back to where it is decided again"
        try:
            record = ControlRecord.model_validate_json(read_sealed(path, remedy))
        except (OSError, ValidationError) as error:
            details = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else error
            raise StoreError(f"{path} is damaged ({details}); {remedy}") from error
        if record.step != step:
            raise StoreError(f"{path} is the record of step {record.step}; {remedy}")
        return record

    def wait(self, step: int) -> ControlRecord:
        """Return the record of a step that is known to be there, but that another host made."""
        await_visible(self._path(step))
        record = self.read(step)
        assert record is not None, step
        return record

    def newest(self) -> ControlRecord | None:
        """Return the record of the last step that was decided; None before the first."""
        steps = numbered_files(self.folder, ".json")
        return self.read(max(steps)) if steps else None

    def decisions(self) -> list[ControlRecord]:
        """Return all records with a decision, in order: for reports."""
        records = (self.read(step) for step in numbered_files(self.folder, ".json"))
        return [record for record in records if record is not None and record.decision is not None]

    def _path(self, step: int) -> Path:
        return self.folder / f"{numbered(step)}.json"
