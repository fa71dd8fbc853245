"""The audit of a run, from its batches alone: nothing lost, nothing trained twice, nothing staler than agreed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.records import Batch
from pipeline.rundir import RunDirectory
from pipeline.schedule import Schedule
from pipeline.store import BatchStore


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What the batches of a run prove. `sound` is what a run must be."""

    missing: tuple[int, ...]
    """Batches below `steps` that are not committed."""
    lost: tuple[int, ...]
    """Groups below the last batch's next_group that are in no batch and no dropped list."""
    duplicated: tuple[int, ...]
    """Groups that are in more than one batch or dropped list."""
    version_violations: int
    """Response tokens of a version that the schedule does not allow in their batch."""
    batches: int
    groups: int
    """Groups trained on or dropped."""
    dropped: int
    """Groups dropped."""
    tokens: int
    """Response tokens."""
    lags: dict[int, int]
    """batch - version → response tokens, ascending."""

    @property
    def sound(self) -> bool:
        return not (self.missing or self.lost or self.duplicated or self.version_violations)


def verify_history(run_dir: Path, schedule: Schedule, steps: int) -> Audit:
    """Read and verify the first `steps` batches of a run. Raises CorruptBatchError."""
    store = BatchStore(RunDirectory(run_dir).batches)
    present = [index for index in range(steps) if store.exists(index)]
    seen: Counter[int] = Counter()
    lags: Counter[int] = Counter()
    next_group = tokens = violations = dropped = 0
    for index in present:
        batch = store.read(index, None)
        seen.update(np.unique(batch.group).tolist())
        seen.update(drop.group for drop in batch.dropped)
        counts = _tokens_by_version(batch)
        lags.update({index - version: count for version, count in counts.items()})
        violations += sum(count for version, count in counts.items() if not schedule.allows(index, version))
        tokens += batch.num_response_tokens
        dropped += len(batch.dropped)
        next_group = max(next_group, batch.next_group)
    return Audit(
        missing=tuple(sorted(set(range(steps)) - set(present))),
        lost=tuple(group for group in range(next_group) if group not in seen),
        duplicated=tuple(sorted(group for group, times in seen.items() if times > 1)),
        version_violations=violations,
        batches=len(present),
        groups=len(seen),
        dropped=dropped,
        tokens=tokens,
        lags=dict(sorted(lags.items())),
    )


def _tokens_by_version(batch: Batch) -> dict[int, int]:
    versions, counts = np.unique(batch.policy_version, return_counts=True)
    return dict(zip(versions.tolist(), counts.tolist(), strict=True))
