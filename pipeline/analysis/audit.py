"""Audit the batches of a run, and find the steps and versions that lack a record.

In the batches, no group may be lost or trained twice, no token staler than the schedule allows, and no value invalid; a
problem is left out when, and only when, its pass rate says so. The records are:

    metrics, consumed, logprobs, mismatch, control   of each step that a checkpoint holds: they are written before it
    checkpoints                                      the newest that was saved
    evaluations                                      of each version that was due before a committed batch, unless it
                                                     was skipped; where they run beside the batches, before another one

The recipe in force at a batch or a step decides: a fork may have another schedule and controller than its parent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path

import numpy as np

from pipeline.data.batch import Batch
from pipeline.data.batch_values import UNKNOWN, Limits, batch_faults
from pipeline.data.event_log import read_events, read_metrics
from pipeline.data.run_directory import RunDirectory, numbered_files
from pipeline.data.run_recipes import all_recipes, recipe_of_step
from pipeline.data.store import BatchStore, LostBatch, RemovedBatch
from pipeline.rollout.batch_builder import SolvedPromptFilter, SolvedPromptRule, attempts
from pipeline.schedule import Schedule

MOST_LOST = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Audit:
    sound: bool
    missing: tuple[int, ...]
    """Batches below `steps` that are not committed."""
    damaged: tuple[LostBatch, ...]
    """Batches below `steps` that are recorded as lost by damage. They alone do not make a history unsound."""
    removed: tuple[int, ...]
    """Batches below `steps` that run.keep_batches removed: only their groups and pass rates are known."""
    lost: tuple[int, ...]
    """Groups below the last batch's next_group that are in no batch (lost or not), not dropped and not open."""
    duplicated: tuple[int, ...]
    """Groups in more than one batch or dropped list, or in one of them and still open after the last batch."""
    version_violations: int
    """Response tokens of a version that the schedule does not allow in their batch."""
    solved_violations: tuple[int, ...]
    """Groups passed over although their problem was not solved, and groups asked although it was."""
    value_faults: tuple[str, ...]
    """The first invalid value of each kind in each batch, with its sample (pipeline.data.batch_values)."""
    batches: int
    groups: int
    """Groups trained on, dropped, or gone with their batch."""
    dropped: int
    """Dropped groups: those of the next three fields, and those that the user's filter rejected."""
    unfit: int
    zero_variance: int
    solved: int
    tokens: int
    """Response tokens, including tokens that no engine sampled."""
    lags: dict[int, int]
    """Lag (batch - version) → response tokens, ascending."""


def verify_history(
    run_dir: Path,
    schedule: Schedule,
    steps: int,
    solved_rule: SolvedPromptRule | None = None,
    limits: Limits = UNKNOWN,
    first: int = 0,
) -> Audit:
    """Read and check the first `steps` batches of a run. Batches before `first` come from the run that it was forked
    from, which may have had another schedule and other rules. Raises CorruptBatchError."""
    store, solved = BatchStore(RunDirectory(run_dir).batches), SolvedPromptFilter(solved_rule)
    settled = [index for index in store.settled() if index < steps]
    damaged = {batch.index: batch for batch in store.all_lost() if batch.index < steps}
    removed = list[int]()
    first_damaged = min(damaged, default=steps)
    seen, faults, misjudged = [np.zeros(0, np.int64)], list[str](), set[int]()
    lags, kinds = Counter[int](), Counter[str]()
    num_tokens = violations = next_group = 0
    open_groups: tuple[int, ...] = ()
    for index in settled:
        batch = store.found(index, lambda one: store.read(one, None, check=False))
        next_group, open_groups = batch.next_group, batch.open_groups
        if not isinstance(batch, Batch):
            seen.append(np.array(batch.groups, np.int64))
            if isinstance(batch, RemovedBatch):
                removed.append(index)
                solved.record(index, attempts(batch, 0.0))
            continue
        faults.extend(f"batch {index}, {fault}" for fault in batch_faults(batch, limits))
        seen += [np.unique(batch.group), np.array([drop.group for drop in batch.dropped], np.int64)]
        versions, tokens = np.unique(batch.policy_version, return_counts=True)
        counts = dict(zip(versions.tolist(), tokens.tolist(), strict=True))
        lags.update({index - version: count for version, count in counts.items()})
        if index >= first:
            violations += sum(count for version, count in counts.items() if not schedule.allows(index, version))
        num_tokens += batch.num_response_tokens
        kinds.update(drop.kind for drop in batch.dropped)
        required = schedule.required_version(index)
        known = solved.solved(required)
        if index >= first and first_damaged >= required:  # else its pass rates rest on samples that are lost
            # Groups that were asked or passed over against what the pass rates say.
            asked = dict(zip(batch.group.tolist(), batch.problem.tolist(), strict=True))
            asked |= {drop.group: drop.problem for drop in batch.dropped if drop.kind != "solved"}
            passed_over = {drop.group: drop.problem for drop in batch.dropped if drop.kind == "solved"}
            misjudged |= {group for group, problem in asked.items() if problem in known}
            misjudged |= {group for group, problem in passed_over.items() if problem not in known}
        solved.record(index, {} if solved_rule is None else attempts(batch, solved_rule.solved_at))
    opened = np.array(open_groups, np.int64)
    groups, times = np.unique(np.concatenate(seen), return_counts=True)
    duplicated = np.union1d(groups[times > 1], np.intersect1d(groups, opened))
    missing = tuple(sorted(set(range(steps)) - set(settled)))
    # At most MOST_LOST of the lost ones are named: a damaged number may be any.
    accounted = np.union1d(groups, opened)
    borders = [-1, *accounted[(accounted >= 0) & (accounted < next_group)].tolist(), next_group]
    between = (range(below + 1, above) for below, above in pairwise(borders) if above - below > 1)
    never = tuple(islice(chain.from_iterable(between), MOST_LOST))
    return Audit(
        sound=not (missing or never or len(duplicated) or violations or misjudged or faults),
        missing=missing,
        damaged=tuple(damaged[index] for index in sorted(damaged)),
        removed=tuple(removed),
        lost=never,
        duplicated=tuple(duplicated.tolist()),
        version_violations=violations,
        solved_violations=tuple(sorted(misjudged)),
        value_faults=tuple(faults),
        batches=len(settled) - len(damaged) - len(removed),
        groups=len(groups),
        dropped=kinds.total(),
        unfit=kinds["unfit"],
        zero_variance=kinds["zero_variance"],
        solved=kinds["solved"],
        tokens=num_tokens,
        lags=dict(sorted(lags.items())),
    )


def find_gaps(run: RunDirectory, repaired: Iterable[str]) -> dict[str, list[int]]:
    """Return the steps and versions that lack a record, by kind of record as in this module's table, without complete
    kinds. Files in `repaired`, relative to the run, were set aside by a repair that recorded them: they are no gaps."""
    known, recipes = set(repaired), all_recipes(run.path)
    removes = any(one.recipe.run.keep_batches or one.recipe.run.keep_logprobs for one in recipes)
    first_scores = min(numbered_files(run.logprobs, ".npy"), default=0) if removes else 0
    finished = run.path / "finished"
    steps = recipes[-1].recipe.run.steps if (finished / "learner").exists() else max(run.saved_steps(), default=0)
    trained = sorted(set(range(steps)) - set(run.skipped_steps()))

    def without(folder: Path, suffix: str, numbers: Iterable[int]) -> list[int]:
        there = {path.name for path in folder.glob(f"*{suffix}")}
        there |= {Path(name).name for name in known if Path(name).parent.name == folder.name}
        return [number for number in numbers if f"{number:06d}{suffix}" not in there]

    noted = {int(line["step"]) for line in read_metrics(run.path)}
    consumed = {int(event["step"]) for event in read_events(run.path, "consumed")}
    saved = [int(event["step"]) for event in read_events(run.path, "saved")]
    newest = max([*saved, *([steps] if (finished / "learner").exists() else [])], default=0)
    gone = newest > max(run.saved_steps(), default=0) and f"checkpoints/{newest:06d}" not in known
    measures = any(run.mismatch.glob("*.zarr.zip"))
    controlled = [step for step in trained if recipe_of_step(recipes, step).controller is not None]
    evaluations = read_events(run.path, "evaluated")
    evaluated = {int(event.get("due", event["version"])) for event in evaluations}
    newest_evaluated = max(evaluated | run.evaluated_versions(), default=-1)
    due, ended = set(), (finished / "collector").exists()
    for index in range(BatchStore(run.batches).next_index):
        recipe = [one.recipe for one in recipes if one.first_batch <= index][-1]
        schedule = recipe.build_schedule()
        version = schedule.published_before(index)
        if index % recipe.evaluation.every == 0 and (not schedule.overlaps or version < newest_evaluated or ended):
            due.add(version)
    if ended:
        due.add(recipes[-1].recipe.run.steps)
    due -= {int(version) for event in evaluations for version in event.get("skipped", ())}
    gaps = dict(
        metrics=[step for step in trained if step not in noted],
        consumed=[step for step in trained if step not in consumed],
        logprobs=without(run.logprobs, ".npy", [step for step in trained if step >= first_scores]),
        mismatch=without(run.mismatch, ".zarr.zip", trained) if measures else [],
        control=without(run.control, ".json", controlled),
        checkpoints=[newest] if gone else [],
        # Versions without the file, or without the event that reports are drawn from.
        evaluations=sorted({*without(run.evaluations, ".json", due), *(due - evaluated)}),
    )
    return {name: numbers for name, numbers in gaps.items() if numbers}
