"""The audit of a run, from its batches alone: nothing lost, nothing trained twice, nothing staler than agreed, no value
that cannot be, and problems left out when, and only when, their pass rate says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from pipeline.data.batch import Batch
from pipeline.data.batch_values import UNKNOWN, Limits, batch_faults
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore, LostBatch
from pipeline.rollout.batch_builder import Attempts, SolvedPromptFilter, SolvedPromptRule
from pipeline.schedule import Schedule

MOST_LOST = 1_000_000
"""Lost groups that are named."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What was found in the batches of a run. `sound` says whether nothing is wrong."""

    missing: tuple[int, ...]
    """Batches below `steps` that are not committed."""
    damaged: tuple[LostBatch, ...]
    """Batches below `steps` that are recorded as lost by damage: nobody can say more of them than their record does. A
    history with them is sound, if nothing else is wrong."""
    lost: tuple[int, ...]
    """Groups below the last batch's next_group that are in no batch, lost ones included, in no dropped list, and not
    open for a later one."""
    duplicated: tuple[int, ...]
    """Groups that are in more than one batch or dropped list, or that the last batch leaves open all the same."""
    version_violations: int
    """Response tokens of a version that the schedule does not allow in their batch."""
    solved_violations: tuple[int, ...]
    """Groups passed over although their problem was not solved, and groups asked although it was."""
    value_faults: tuple[str, ...]
    """The first value of each kind, in each batch, that cannot be (pipeline.data.batch_values), and its sample."""
    batches: int
    groups: int
    """Groups trained on or dropped."""
    dropped: int
    """Groups dropped: the next three kinds, and those that the user's filter did not keep."""
    unfit: int
    zero_variance: int
    solved: int
    tokens: int
    """Response tokens, those that no engine sampled included."""
    lags: dict[int, int]
    """batch - version → response tokens, ascending."""

    @property
    def sound(self) -> bool:
        wrong = self.missing or self.lost or self.duplicated or self.version_violations or self.solved_violations
        return not (wrong or self.value_faults)


def verify_history(
    run_dir: Path,
    schedule: Schedule,
    steps: int,
    solved_rule: SolvedPromptRule | None = None,
    limits: Limits = UNKNOWN,
    first: int = 0,
) -> Audit:
    """Read and verify the first `steps` batches of a run. Batches before `first` are those of the run that it was
    forked from, which may have had another schedule and other rules. Raises CorruptBatchError."""
    store = BatchStore(RunDirectory(run_dir).batches)
    damaged = {batch.index: batch for batch in store.all_lost() if batch.index < steps}
    there = set(store.committed()) - damaged.keys()
    present = [index for index in range(steps) if index in there]
    found = _Tally(schedule, limits, SolvedPromptFilter(solved_rule), min(damaged, default=steps), first)
    for index in sorted({*present, *damaged}):
        if index in damaged:
            found.skip(damaged[index])
        else:
            found.add(store.read(index, None, check=False))
    next_group, open_groups = found.groups_to_ask
    seen, kinds = found.seen, found.kinds
    reopened = seen.keys() & set(open_groups)
    return Audit(
        missing=tuple(sorted(set(range(steps)) - set(present) - damaged.keys())),
        damaged=tuple(damaged[index] for index in sorted(damaged)),
        lost=_lost(next_group, seen.keys() | set(open_groups)),
        duplicated=tuple(sorted(reopened | {group for group, times in seen.items() if times > 1})),
        version_violations=found.violations,
        solved_violations=tuple(sorted(found.misjudged)),
        value_faults=tuple(found.faults),
        batches=len(present),
        groups=len(seen),
        dropped=kinds.total(),
        unfit=kinds["unfit"],
        zero_variance=kinds["zero_variance"],
        solved=kinds["solved"],
        tokens=found.tokens,
        lags=dict(sorted(found.lags.items())),
    )


@dataclass
class _Tally:
    """What was found in the batches so far; they come in their order."""

    schedule: Schedule
    limits: Limits
    solved: SolvedPromptFilter
    first_damaged: int
    """The first batch that was lost by damage."""
    first: int
    """The first batch that the run has sampled itself."""
    seen: Counter[int] = field(default_factory=Counter)
    lags: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    misjudged: set[int] = field(default_factory=set)
    tokens: int = 0
    violations: int = 0
    groups_to_ask: tuple[int, tuple[int, ...]] = (0, ())

    def skip(self, lost: LostBatch) -> None:
        """A batch of which only its record is left."""
        self.seen.update(lost.groups)
        self.groups_to_ask = lost.next_group, lost.open_groups

    def add(self, batch: Batch) -> None:
        """The next batch."""
        index = batch.index
        self.faults.extend(f"batch {index}, {fault}" for fault in batch_faults(batch, self.limits))
        self.seen.update(np.unique(batch.group).tolist())
        self.seen.update(drop.group for drop in batch.dropped)
        counts = _tokens_by_version(batch)
        self.lags.update({index - version: count for version, count in counts.items()})
        stale = (count for version, count in counts.items() if not self.schedule.allows(index, version))
        self.violations += sum(stale) if index >= self.first else 0
        self.tokens += batch.num_response_tokens
        self.kinds.update(drop.kind for drop in batch.dropped)
        required = self.schedule.required_version(index)
        known = self.solved.solved(required)
        if index >= self.first and self.first_damaged >= required:  # else its pass rates rest on samples that are lost
            self.misjudged |= _misjudged(batch, known)
        self.solved.record(batch)
        self.groups_to_ask = batch.next_group, batch.open_groups


def _lost(next_group: int, known: Set[int]) -> tuple[int, ...]:
    """The groups below `next_group` that are not known, at most MOST_LOST of them: a damaged number may be any."""
    return tuple(islice((group for group in range(next_group) if group not in known), MOST_LOST))


def _misjudged(batch: Batch, solved: Mapping[int, Attempts]) -> set[int]:
    """Groups of one batch that were asked or passed over against what the pass rates say."""
    asked = dict(zip(batch.group.tolist(), batch.problem.tolist(), strict=True))
    asked |= {drop.group: drop.problem for drop in batch.dropped if drop.kind != "solved"}
    passed_over = {drop.group: drop.problem for drop in batch.dropped if drop.kind == "solved"}
    return {group for group, problem in asked.items() if problem in solved} | {
        group for group, problem in passed_over.items() if problem not in solved
    }


def _tokens_by_version(batch: Batch) -> dict[int, int]:
    versions, counts = np.unique(batch.policy_version, return_counts=True)
    return dict(zip(versions.tolist(), counts.tolist(), strict=True))
