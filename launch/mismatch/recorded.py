"""`evenkeel mismatch RUN`: a batch that a run recorded, attributed after the fact.

    checkpoint ─▶ train again up to each version that sampled the batch ─▶ its weights in full precision
    weights    ─▶ learner: plain, with the formats layer by layer, with known faults
    weights    ─▶ engine, in the rollout's format: prefill                       decode: as the batch recorded it

What the learner says now is what it said when it trained on the batch; the run keeps that. Training again is
bit-identical for the layout and machine that trained (launch.run.replay). The run itself is only read.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from launch.build.components import build_quant_map
from launch.build.engines import check_engines
from launch.build.weight_checks import checksums_of
from launch.mismatch.assembly import Sides, describe, searched_rows
from launch.mismatch.engine import MeasuredEngine
from launch.mismatch.fresh import moved
from launch.mismatch.rows import SampledRows
from launch.mismatch.scoring import MOST_ROWS, Job, VersionRows, responses_of, score_in_ranks
from launch.run.processes import child_environment, run_ranks, torchrun
from launch.run.replay import learned_otherwise
from megatron_bridge.hf.tensor_folder import TensorFolder
from megatron_bridge.hf.writer import write_policy
from pipeline.analysis.mismatch.measured import Audit, Measured
from pipeline.config.recipe import Recipe
from pipeline.control.files import ControlFiles
from pipeline.data.batch import Batch
from pipeline.data.files import NUMBER
from pipeline.data.run_directory import RunDirectory, numbered
from pipeline.data.run_recipes import RecipeInForce, all_recipes
from pipeline.data.store import BatchStore
from pipeline.errors import RunConflictError, StoreError
from pipeline.ports.weight_check import WeightCheck

WEIGHTS = "weights"

_STEP = re.compile(NUMBER)


@dataclass(frozen=True)
class Recorded:
    """One batch, with what the learner said before it trained on it."""

    index: int
    batch: Batch
    now: NDArray[np.float64]
    """[responses] NaN where the learner never looked, and in rows that are left out."""
    rows_left_out: int = 0
    """Of a large batch only some rows are attributed, evenly spread."""

    @property
    def counts(self) -> NDArray[np.bool_]:
        """[responses] tokens that an engine sampled and the learner scored."""
        return np.asarray(self.batch.loss_mask & np.isfinite(self.now))

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(np.unique(self.batch.policy_version[self.counts]).tolist())

    def rows(self) -> SampledRows:
        batch = self.batch
        return SampledRows(
            tokens=[batch.sample_tokens(sample).tolist() for sample in range(batch.num_samples)],
            prompt_lengths=batch.prompt_lengths.tolist(),
            decode=batch.rollout_logprobs.astype(np.float64),
            kept=batch.kept,
            experts=batch.experts,
        )


def measure_run(path: Path, *, batch: int | None, locate: bool) -> Measured:
    """Attribute batch `batch` of a run, by default the last that was trained on. Raises FatalError."""
    source = RunDirectory(path)
    recipes = all_recipes(path)  # first, for it refuses a run of another format
    recorded = read(source, batch)
    sampled_by = [one for one in recipes if one.first_batch <= recorded.index][-1]  # of a fork, perhaps its parent's
    recipe = sampled_by.recipe
    check_engines(recipe)
    require_first_map(source, recorded, sampled_by)
    refuse_learned_otherwise(source, recorded, recipes, sampled_by)
    with tempfile.TemporaryDirectory(prefix="evenkeel-mismatch-") as scratch:
        local = moved(recipe, Path(scratch))
        run = RunDirectory(local.directory)
        run.freeze(local)
        folders = weights_of(source, run, local, recorded.versions)
        job = _job(recorded, folders, locate)
        learner = score_in_ranks(run, local, job, recorded.batch.experts)
        temperature = local.learner.temperature or local.rollout.temperature
        prefill, audit = _prefill(run, local, job, recorded, temperature)
    sides = Sides(
        rows=recorded.rows(),
        version=recorded.batch.policy_version.astype(np.int64),
        counts=recorded.counts,
        now=recorded.now,
        prefill=prefill,
        learner=learner,
        job=job,
    )
    name = f"{path.name}, batch {recorded.index}"
    setting = describe(recipe, name, "recorded", recorded.versions, rows=sides.rows, prefilled=prefill is not None)
    if recorded.rows_left_out:
        remark = f"Attributed are {MOST_ROWS} rows, evenly spread; {recorded.rows_left_out:,} more are left out."
        setting = replace(setting, remarks=(*setting.remarks, remark))
    return sides.measured(setting, audit)


def read(source: RunDirectory, index: int | None) -> Recorded:
    """The batch, and what the learner said. Raises StoreError when it is not trained yet."""
    store = BatchStore(source.batches)
    lost = {batch.index for batch in store.all_lost()}
    trained = sorted({int(path.stem) for path in source.logprobs.glob("*.npy") if _STEP.fullmatch(path.stem)} - lost)
    wanted = max(trained, default=0) if index is None else index
    if wanted not in trained:
        raise StoreError(
            f"{source.path} has not trained on batch {wanted}; trained are "
            f"{f'{trained[0]} to {trained[-1]}' if trained else 'none'}; give --batch one of these, or train on"
        )
    batch = store.read(wanted, None)
    now = source.learner_logprobs(wanted, len(batch.rollout_logprobs))
    assert now is not None, wanted
    recorded = Recorded(wanted, batch, now.astype(np.float64))
    if not recorded.counts.any():
        raise StoreError(
            f"batch {wanted} of {source.path} has no token that the learner looked at; give another --batch"
        )
    return bounded(recorded)


def bounded(recorded: Recorded) -> Recorded:
    """With at most MOST_ROWS rows that have tokens to attribute."""
    row = np.repeat(np.arange(recorded.batch.num_samples), np.diff(recorded.batch.response_offsets))
    every = np.unique(row[recorded.counts])
    chosen = searched_rows(every, MOST_ROWS)
    now = np.where(np.isin(row, chosen), recorded.now, np.nan)
    return replace(recorded, now=now, rows_left_out=len(every) - len(chosen))


def require_first_map(source: RunDirectory, recorded: Recorded, sampled_by: RecipeInForce) -> None:
    """Raises StoreError when the ESS controller may have changed the engines' formats before the batch was sampled:
    engines change over one by one, so that the formats of a token are not known afterwards."""
    if sampled_by.recipe.controller is None:
        return  # records that a fork has are its parent's
    control = ControlFiles(source.control, source.fence)
    changed = [record for record in control.decisions() if record.state.quant_map > 0]
    begun = control.read(sampled_by.first_step - 1) if sampled_by.first_step else None
    if begun is not None and begun.state.quant_map == 0:  # a fork's controller began afresh
        changed = [record for record in changed if record.step >= sampled_by.first_step]
    first = changed[0].step + 1 if changed else math.inf  # the version that the decision came with
    if max(recorded.versions) >= first:
        raise StoreError(
            f"batch {recorded.index} of {source.path} was sampled by versions {min(recorded.versions)} to "
            f"{max(recorded.versions)}, and from version {first} on the controller changed the engines' formats; "
            "measured afterwards are batches of earlier versions alone; give --batch an earlier one, or measure a "
            f"recipe with rollout.quant_map={source.quant_maps / f'{changed[0].state.quant_map:06d}.yaml'}"
        )


def refuse_learned_otherwise(
    source: RunDirectory, recorded: Recorded, recipes: Sequence[RecipeInForce], sampled_by: RecipeInForce
) -> None:
    """Raises RunConflictError when steps would be trained again by a recipe that they were not trained by."""
    if not (wanted := [version for version in recorded.versions if version > 0]):
        return
    first = checkpoint_before(source, min(wanted)) or 0
    if (changed := learned_otherwise(recipes, range(first, max(wanted)), sampled_by)) is not None:
        raise RunConflictError(
            f"batch {recorded.index} of {source.path} cannot be measured: what sampled it is made by training steps "
            f"{first} to {max(wanted) - 1} again, but {changed}; give --batch one with a checkpoint since then at or "
            "before its versions, or measure the run that it is a fork of"
        )


def weights_of(source: RunDirectory, run: RunDirectory, recipe: Recipe, versions: tuple[int, ...]) -> dict[int, Path]:
    """Version → HF folder in full precision: the model that the run began with, or trained again into `run`."""
    found = {version: run.path / WEIGHTS / numbered(version) for version in versions if version > 0}
    if found:
        run.set_published(0)
        wanted = ",".join(map(str, found))
        command = torchrun(
            recipe.learner.num_processes, "launch.mismatch.replay_ranks", str(run.path), str(source.path), wanted
        )
        run_ranks(run, command, log=run.logs / "replay.log", env=child_environment())
    return {version: found.get(version, recipe.model.path.absolute()) for version in versions}


def checkpoint_before(source: RunDirectory, version: int) -> int | None:
    """The step of the newest checkpoint that is not after `version`; None: all is trained again."""
    return max((step for step in source.saved_steps() if step <= version), default=None)


def _job(recorded: Recorded, folders: dict[int, Path], locate: bool) -> Job:
    rows = recorded.rows()
    version = recorded.batch.policy_version
    parts = tuple(
        VersionRows(
            number=number,
            weights=folder,
            rows=tuple(np.unique(rows.row[recorded.counts & (version == number)]).tolist()),
        )
        for number, folder in folders.items()
    )
    newest = np.array(parts[-1].rows, np.int64)
    return Job(
        **responses_of(rows),
        replayed=rows.experts is not None,
        versions=parts,
        former=parts[-2].weights if len(parts) > 1 else None,
        searched=searched_rows(newest) if locate else (),
    )


def _prefill(
    run: RunDirectory, recipe: Recipe, job: Job, recorded: Recorded, temperature: float
) -> tuple[NDArray[np.float64] | None, Audit]:
    """[responses] what the engine says with the weights of the version that sampled each token, and its audit."""
    for part in job.versions:
        _write_policy(run, recipe, part)
    run.set_published(job.versions[0].number)
    rows = recorded.rows()
    found = np.full(len(recorded.counts), np.nan)
    with MeasuredEngine(run, recipe) as engine:
        for place, part in enumerate(job.versions):
            if place:
                run.set_published(part.number)
                engine.serve(part.number)
            values = engine.score(rows.part(part.rows), temperature)
            if values is None:
                return None, engine.audit
            here = np.isin(rows.row, part.rows)
            found[here] = np.where(recorded.batch.policy_version[here] == part.number, values, found[here])
        return found, engine.audit


def _write_policy(run: RunDirectory, recipe: Recipe, part: VersionRows) -> None:
    """The version's folder in the rollout's format, with its checksums."""
    digests = checksums_of(recipe)

    def write_check(folder: Path) -> None:
        WeightCheck(version=part.number, digests=() if digests is None else digests.digests()).save(folder)

    write_policy(
        TensorFolder(part.weights).tensors(),
        recipe.model.path,
        run.policy_directory(part.number),
        build_quant_map(recipe),
        digests=digests,
        beside=write_check,
    )
