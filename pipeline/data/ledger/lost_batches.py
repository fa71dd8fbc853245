"""RUN/batches/000012.lost.json: batch 12 was lost by damage, and cannot be sampled again by the rules.

    made by `evenkeel repair`, while no role of the run is alive; exclusively, never changed
    read by the collector, which goes on behind it; the learner, which skips its step; audit, replay and reports

A lost batch still has its place in the ledger: its groups are asked by no other batch. Which groups it held follows
from the batches around it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pipeline.data.integrity.sealed import create_sealed, read_sealed_json
from pipeline.data.run_directory import RunDirectory, numbered
from pipeline.errors import StoreError

LOST_SUFFIX = ".lost.json"
Known = Literal["all", "together", "first"]
"""What is known of a lost batch's groups. all: just these. together: several batches in a row were lost, which held
these together. first: no batch after it is known, so it held at least these, and those that it asked in place of
dropped ones are asked again."""


@dataclass(frozen=True, kw_only=True)
class LostBatch:
    """One batch that was lost by damage."""

    index: int
    reason: str
    """What its file failed on, or that it was missing."""
    recorded: str
    """When, UTC, and by which process."""
    learned: bool
    """Whether the newest checkpoint at that time had learned from it. If not, its step is skipped."""
    groups: tuple[int, ...]
    known: Known
    next_group: int
    """As in Batch: the first group that no batch had taken, counting those of this one."""
    open_groups: tuple[int, ...]
    """As in Batch."""

    def __str__(self) -> str:
        learned = "the learner had learned from it" if self.learned else "its step is skipped"
        return f"batch {self.index} was lost by damage ({self.reason}; recorded {self.recorded}); {learned}"

    def write(self, path: Path) -> None:
        """Raises FileExistsError when it is recorded already."""
        create_sealed(path, json.dumps(asdict(self)) + "\n")

    @staticmethod
    def read(path: Path) -> LostBatch:
        """Raises StoreError when the record is damaged."""
        remedy = f"repair the run: `evenkeel repair {path.parents[1]}`"
        fields = read_sealed_json(path, remedy)
        try:
            for name in ("groups", "open_groups"):
                fields[name] = tuple(fields[name])
            lost = LostBatch(**fields)
            if f"{numbered(lost.index)}{LOST_SUFFIX}" != path.name:
                raise ValueError(f"it is that of batch {lost.index}")
            return lost
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(f"{path} is damaged ({error}); {remedy}") from error


def refuse_to_pass_lost(run: RunDirectory, lost: Iterable[LostBatch], first: int, end: int) -> None:
    """Raises StoreError when steps first … end - 1 cannot be repeated as they were: one had learned from a batch that
    was lost since."""
    skipped = run.skipped_steps()
    for batch in lost:
        if first <= batch.index < end and batch.index not in skipped:
            raise StoreError(
                f"{batch}: steps from {batch.index} on cannot be repeated as they were; what can be read of the run "
                f"is listed by `evenkeel verify history {run.path}`"
            )
