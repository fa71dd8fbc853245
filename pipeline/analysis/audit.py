"""The audit of a run. From its batches alone: nothing lost, nothing trained twice, nothing staler than agreed, no value
that cannot be, and problems left out when, and only when, their pass rate says so. And which steps and versions lack a
record that they should have left:

metrics, consumed, logprobs, mismatch, control
                                         of each step that a checkpoint holds; they are written before it
checkpoints                              the newest that was saved
evaluations                              of each version that was due before a batch that is committed

Which were due, and whether a controller left a record, says the recipe that the batch was sampled by, or the step
trained by: a fork may have another schedule and another controller than the run that it comes from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain, islice, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.data.batch import Batch
from pipeline.data.batch_values import UNKNOWN, Limits, batch_faults
from pipeline.data.event_log import read_events, read_metrics
from pipeline.data.run_directory import RunDirectory
from pipeline.data.run_recipes import all_recipes, recipe_of_step
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
    kinds, opened = found.kinds, np.array(open_groups, np.int64)
    groups, times = np.unique(np.concatenate([np.zeros(0, np.int64), *found.seen]), return_counts=True)
    duplicated = np.union1d(groups[times > 1], np.intersect1d(groups, opened))
    return Audit(
        missing=tuple(sorted(set(range(steps)) - set(present) - damaged.keys())),
        damaged=tuple(damaged[index] for index in sorted(damaged)),
        lost=_lost(next_group, np.union1d(groups, opened)),
        duplicated=tuple(duplicated.tolist()),
        version_violations=found.violations,
        solved_violations=tuple(sorted(found.misjudged)),
        value_faults=tuple(found.faults),
        batches=len(present),
        groups=len(groups),
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
    seen: list[NDArray[np.int64]] = field(default_factory=list)
    """Groups of each batch, and of each dropped list."""
    lags: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    misjudged: set[int] = field(default_factory=set)
    tokens: int = 0
    violations: int = 0
    groups_to_ask: tuple[int, tuple[int, ...]] = (0, ())

    def skip(self, lost: LostBatch) -> None:
        """A batch of which only its record is left."""
        self.seen.append(np.array(lost.groups, np.int64))
        self.groups_to_ask = lost.next_group, lost.open_groups

    def add(self, batch: Batch) -> None:
        """The next batch."""
        index = batch.index
        self.faults.extend(f"batch {index}, {fault}" for fault in batch_faults(batch, self.limits))
        self.seen.append(np.unique(batch.group))
        self.seen.append(np.array([drop.group for drop in batch.dropped], np.int64))
        versions, tokens = np.unique(batch.policy_version, return_counts=True)
        counts = dict(zip(versions.tolist(), tokens.tolist(), strict=True))
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


def _lost(next_group: int, known: NDArray[np.int64]) -> tuple[int, ...]:
    """Return the groups below `next_group` that are not among `known`, ascending; at most MOST_LOST of them: a damaged
    number may be any."""
    borders = [-1, *known[(known >= 0) & (known < next_group)].tolist(), next_group]
    between = (range(below + 1, above) for below, above in pairwise(borders) if above - below > 1)
    return tuple(islice(chain.from_iterable(between), MOST_LOST))


def _misjudged(batch: Batch, solved: Mapping[int, Attempts]) -> set[int]:
    """Groups of one batch that were asked or passed over against what the pass rates say."""
    asked = dict(zip(batch.group.tolist(), batch.problem.tolist(), strict=True))
    asked |= {drop.group: drop.problem for drop in batch.dropped if drop.kind != "solved"}
    passed_over = {drop.group: drop.problem for drop in batch.dropped if drop.kind == "solved"}
    return {group for group, problem in asked.items() if problem in solved} | {
        group for group, problem in passed_over.items() if problem not in solved
    }


@dataclass(frozen=True, kw_only=True)
class Gaps:
    """Steps, or versions, by what they lack; ascending. What a repair set aside is no gap: its record says so."""

    metrics: tuple[int, ...]
    consumed: tuple[int, ...]
    """Steps without the event."""
    logprobs: tuple[int, ...]
    mismatch: tuple[int, ...]
    control: tuple[int, ...]
    checkpoints: tuple[int, ...]
    evaluations: tuple[int, ...]
    """Versions without the file or without the event that reports are drawn from."""

    @property
    def none(self) -> bool:
        return not any(getattr(self, field.name) for field in fields(self))


def find_gaps(run: RunDirectory, repaired: Iterable[str]) -> Gaps:
    """Return the steps and versions that lack a record. `repaired` names files, relative to the run, that a repair
    has set aside."""
    known, recipes = set(repaired), all_recipes(run.path)
    finished = run.path / "finished"
    steps = recipes[-1].recipe.run.steps if (finished / "learner").exists() else max(run.saved_steps(), default=0)
    trained = sorted(set(range(steps)) - set(run.skipped_steps()))

    def without(folder: Path, suffix: str, numbers: Iterable[int]) -> tuple[int, ...]:
        there = {path.name for path in folder.glob(f"*{suffix}")}
        there |= {Path(name).name for name in known if Path(name).parent.name == folder.name}
        return tuple(number for number in numbers if f"{number:06d}{suffix}" not in there)

    noted = {int(line["step"]) for line in read_metrics(run.path)}
    consumed = {int(event["step"]) for event in read_events(run.path, "consumed")}
    saved = [int(event["step"]) for event in read_events(run.path, "saved")]
    newest = max([*saved, *([steps] if (finished / "learner").exists() else [])], default=0)
    gone = newest > max(run.saved_steps(), default=0) and f"checkpoints/{newest:06d}" not in known
    measures = any(run.mismatch.glob("*.zarr.zip"))
    controlled = [step for step in trained if recipe_of_step(recipes, step).controller is not None]
    due = set()  # before their batch was committed, or the collector ended
    for index in range(BatchStore(run.batches).next_index):
        recipe = [one.recipe for one in recipes if one.first_batch <= index][-1]
        if index % recipe.evaluation.every == 0:
            due.add(recipe.build_schedule().published_before(index))
    if (finished / "collector").exists():
        due.add(recipes[-1].recipe.run.steps)
    evaluated = {int(event["version"]) for event in read_events(run.path, "evaluated")}
    return Gaps(
        metrics=tuple(step for step in trained if step not in noted),
        consumed=tuple(step for step in trained if step not in consumed),
        logprobs=without(run.logprobs, ".npy", trained),
        mismatch=without(run.mismatch, ".zarr.zip", trained) if measures else (),
        control=without(run.control, ".json", controlled),
        checkpoints=(newest,) if gone else (),
        evaluations=tuple(sorted({*without(run.evaluations, ".json", due), *(due - evaluated)})),
    )
