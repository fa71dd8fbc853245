"""Keep the ESS controller's records: RUN/control/000012.json has its evidence of step 12 and the resulting state.

The learner creates a step's record exclusively, under the fence, before it publishes version step + 1. Only then is a
decision made: a learner killed before has decided nothing, and a learner restarted afterwards finds the record and
follows it. So each step is decided once, however often it is trained, and a replay follows the run.

    learner     reads the record of the step before its first one, and of every step that it trains again
    collector   reads the record of the newest published version: its lags hold for the batches that it begins
    engines     look for the newest record by its name: it lists the engines to restart
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from pipeline.data.checksums import create_sealed, read_sealed
from pipeline.data.files import await_visible, is_there, make_folder
from pipeline.data.run_directory import numbered, numbered_files
from pipeline.errors import StoreError
from precision.controller.policy import Decision, Evidence, State
from precision.settings import Settings


class ControlRecord(Settings):
    """A step's record. The fields after `decision` follow from the state, for processes without the ladder."""

    step: int
    evidence: Evidence | None = None
    """None: the step was skipped because its batch was lost, or a fork begins afresh after it."""
    state: State
    decision: Decision | None = None
    lr_by_age: bool = False
    """Whether each batch's age lowers the learning rate after this step."""
    lags: tuple[tuple[int, int], ...] = ()
    """(first batch, lag), ascending: every lag decided so far."""
    promoted: tuple[str, ...] = ()
    """Modules of the recipe's quant map that map `state.quant_map` does not quantize."""
    restarts: Mapping[int, int] = {}
    """Engine → its latest bad start, for every engine that was to be restarted so far."""
    first_seen: Mapping[int, tuple[int, int]] = {}
    """Engine → (its latest start, the step after which that start was first announced). In batches that had begun by
    then, its tokens may be of the start before."""


@dataclass(frozen=True)
class ControlFiles:
    """The folder `control/` of a run."""

    folder: Path
    fence: Callable[[], None]

    def create(self, record: ControlRecord) -> bool:
        """Create the record of a step, permanently. Returns False if the step has one already."""
        self.fence()
        make_folder(self.folder)
        try:
            create_sealed(self._path(record.step), record.model_dump_json() + "\n")
        except FileExistsError:
            return False
        return True

    def read(self, step: int) -> ControlRecord | None:
        """Return the record of a step, or None. Raises StoreError if it is damaged."""
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
        """Return the record of a step that another host has created."""
        await_visible(self._path(step))
        record = self.read(step)
        assert record is not None, step
        return record

    def newest(self) -> ControlRecord | None:
        """Return the record of the last decided step, or None before the first."""
        steps = numbered_files(self.folder, ".json")
        return self.read(max(steps)) if steps else None

    def newest_step(self, published: int) -> int | None:
        """Return the last decided step, or None before the first, without a listing: version `published` is published,
        and the record of the step before it was made earlier."""
        step = max(published - 1, 0)
        while is_there(self._path(step + 1)):
            step += 1
        return step if is_there(self._path(step)) else None

    def decisions(self) -> list[ControlRecord]:
        """Return all records with a decision, in order, for reports."""
        records = (self.read(step) for step in numbered_files(self.folder, ".json"))
        return [record for record in records if record is not None and record.decision is not None]

    def _path(self, step: int) -> Path:
        return self.folder / f"{numbered(step)}.json"
