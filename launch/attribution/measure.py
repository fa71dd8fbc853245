"""Attribute the mismatch of learner and engine, of fresh rollouts or of a recorded batch: `evenkeel mismatch`.

RECIPE: an engine samples the task's prompts, and learner and engine score what it sampled.

    model.path ─▶ version 0 in the rollout's format ─▶ engine: sample, prefill, checksums
         └──────▶ learner: plain, with the formats layer by layer, with known faults; with the weights of --now

RUN: a batch that a run recorded. What the learner says now is what it said when it trained on the batch; the run keeps
that. Training again is bit-identical for the layout and machine that trained. The run itself is only read.

    checkpoint ─▶ train again up to each version that sampled the batch ─▶ its weights in full precision
    weights    ─▶ learner: plain, with the formats layer by layer, with known faults
    weights    ─▶ engine, in the rollout's format: prefill                       decode: as the batch recorded it
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from launch.attribution.engine import MeasuredEngine
from launch.attribution.rows import (
    MOST_ROWS,
    MOST_SEARCHED_ROWS,
    SampledRows,
    ScoringJob,
    VersionRows,
    responses_of,
    score_in_ranks,
)
from launch.build.components import build_quant_map
from launch.build.engines import check_engines, checksums_maker, engine_dtype
from launch.run.preflight import preflight, seed_policy
from launch.run.processes import child_environment, run_ranks, torchrun
from launch.run.replay import learned_otherwise
from megatron_bridge.hf.folders import write_policy
from megatron_bridge.hf.model_config import ModelConfig, read_hf_config
from megatron_bridge.hf.tensor_files import TensorFolder
from pipeline.analysis.mismatch import EngineCheck, Measured, Setting, findings, verdict, write_page
from pipeline.config.loader import load_recipe, recipe_from
from pipeline.config.recipe import Recipe
from pipeline.control.files import ControlFiles
from pipeline.data.batch import Batch
from pipeline.data.files import NUMBER, write_atomically
from pipeline.data.run_directory import RunDirectory, numbered
from pipeline.data.run_recipes import RecipeInForce, all_recipes
from pipeline.data.store import BatchStore
from pipeline.errors import RecipeError, RunConflictError, StoreError
from pipeline.ports.weights import WeightCheck
from precision.mismatch.attribution import TokenScores

WEIGHTS = "weights"
Flat = NDArray[np.float64]
_STEP = re.compile(NUMBER)


@dataclass(frozen=True, kw_only=True)
class Sides:
    """What was scored, all arrays over the response tokens of all rows."""

    rows: SampledRows
    version: NDArray[np.int64]
    """The version that sampled the token."""
    counts: NDArray[np.bool_]
    """False for tokens that no engine sampled, or that the learner never scored."""
    now: Flat | None
    """By the learner at the weights that are trained; None: those that sampled."""
    prefill: Flat | None
    """By the engine, at the version that sampled; None: not to be had."""
    learner: Mapping[str, Flat]
    """What launch.attribution.score_ranks wrote for `job`."""
    job: ScoringJob

    def measured(self, setting: Setting, audit: EngineCheck) -> Measured:
        """All of it for the tokens that count."""
        kept = self.counts
        then = self._required("then")
        quantized, routed = self._at_version("quantized"), self._at_version("routed")
        prefix = "layer."
        layers = sorted(int(name.removeprefix(prefix)) for name in self._names() if name.startswith(prefix))
        searched = self._searched_rows() & (self.version == self.job.versions[-1].number)
        tried = np.asarray(searched & kept)
        if self.job.searched and not any(name.startswith("effect.") for name in self.learner):
            remark = "The search for known faults failed, for want of memory perhaps; --no-locate leaves it out."
            setting = replace(setting, remarks=(*setting.remarks, remark))
        return Measured(
            setting=setting,
            scores=TokenScores(
                now=_tensor(then if self.now is None else self.now, kept),
                then=_tensor(then, kept),
                quantized=None if quantized is None else _tensor(quantized, kept),
                routed=None if routed is None else _tensor(routed, kept),
                prefill=None if self.prefill is None else _tensor(self.prefill, kept),
                decode=_tensor(self.rows.decode, kept),
            ),
            position=self.rows.position[kept],
            entropy=self._required("entropy")[kept],
            layer_steps={layer: self._required(f"{prefix}{layer}")[kept] for layer in layers},
            searched=tried[kept],
            effects={
                name.removeprefix("effect."): values[tried[self._searched_rows()]]
                for name, values in self.learner.items()
                if name.startswith("effect.")
            },
            audit=audit,
        )

    def _names(self) -> list[str]:
        """Of the arrays of a version."""
        prefix = f"{self.job.versions[-1].number}."
        return [name.removeprefix(prefix) for name in self.learner if name.startswith(prefix)]

    def _required(self, name: str) -> Flat:
        found = self._at_version(name)
        assert found is not None, name
        return found

    def _at_version(self, name: str) -> Flat | None:
        """The learner's values of each token at the version that sampled it, NaN where none did."""
        if name not in self._names():
            return None
        values = np.full(len(self.version), np.nan)
        for part in self.job.versions:
            here = np.isin(self.rows.row, part.rows)
            values[here] = np.where(
                self.version[here] == part.number, self.learner[f"{part.number}.{name}"], values[here]
            )
        return values

    def _searched_rows(self) -> NDArray[np.bool_]:
        return np.asarray(np.isin(self.rows.row, self.job.searched))


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


def measure(
    source: Path,
    overrides: Sequence[str],
    *,
    out: Path | None,
    num_prompts: int | None,
    now: Path | None,
    batch: int | None,
    locate: bool,
) -> dict[str, Any]:
    """Attribute fresh rollouts of a recipe, or a recorded batch of a run, into the folder `out`: mismatch.json
    and mismatch.html. Raises FatalError."""
    if (source / "recipe.yaml").is_file():
        _refuse({"--prompts": num_prompts, "--now": now, "--set": list(overrides) or None}, "a recipe")
        measured = measure_run(source, batch=batch, locate=locate)
        name, root = source.name, source.parent
    else:
        _refuse({"--batch": batch}, "a run directory")
        recipe = load_recipe(source, overrides)
        count = num_prompts or recipe.rollout.prompts_per_batch
        measured = measure_recipe(recipe, num_prompts=count, now=now, locate=locate)
        name, root = recipe.run.name, recipe.run.root
    result = judged(measured)
    folder = out or root / f"{name}-mismatch"
    page = write_page(result, folder)
    write_atomically(folder / "mismatch.json", json.dumps(result) + "\n")
    return {**result, "page": str(page)}


def _refuse(options: Mapping[str, Any], belongs_to: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise RecipeError(f"{name} belongs to {belongs_to}; leave it out, or give {belongs_to}")


def judged(measured: Measured) -> dict[str, Any]:
    """The attribution with its findings and its verdict."""
    result = measured.result()
    found = findings(result)
    return {
        **result,
        "cause": asdict(found[0]) if found else None,
        "findings": [asdict(one) for one in found],
        "verdict": verdict(result, found),
    }


def measure_recipe(recipe: Recipe, *, num_prompts: int, now: Path | None, locate: bool) -> Measured:
    """Sample `num_prompts` prompts and attribute. `now` is an HF folder of the weights that are trained, by default
    those that the engine serves; `locate` tries known faults. Raises FatalError."""
    preflight(recipe)
    check_engines(recipe)
    with tempfile.TemporaryDirectory(prefix="evenkeel-mismatch-") as scratch:
        local = recording_experts(moved(recipe, Path(scratch)))
        run = RunDirectory(local.directory)
        run.freeze(local)
        seed_policy(run, local)
        temperature = local.learner.temperature or local.rollout.temperature
        with MeasuredEngine(run, local) as engine:
            rows = engine.sample_task(num_prompts)
            prefill = engine.score(rows, temperature)
            audit = engine.audit
        job = _fresh_job(recipe, rows, now, locate)
        learner = score_in_ranks(run, local, job, rows.experts)
    num_responses = len(rows.decode)
    sides = Sides(
        rows=rows,
        version=np.zeros(num_responses, np.int64),
        counts=np.ones(num_responses, np.bool_),
        now=learner.get("now"),
        prefill=prefill,
        learner=learner,
        job=job,
    )
    setting = describe(recipe, recipe.run.name, "fresh", (0,), rows=rows, prefilled=prefill is not None)
    return sides.measured(setting, audit)


def moved(recipe: Recipe, root: Path) -> Recipe:
    """The same recipe for a run below another folder."""
    data = recipe.model_dump(mode="json")
    return recipe_from({**data, "run": {**data["run"], "root": str(root)}}, source="mismatch")


def recording_experts(recipe: Recipe) -> Recipe:
    """The same recipe; engines of a mixture say where they send tokens, whatever the learner trains with."""
    mixture = ModelConfig.from_hf(read_hf_config(recipe.model.path)).experts is not None
    data = recipe.model_dump(mode="json")
    rollout = {**data["rollout"], "replay_experts": mixture}
    return recipe_from({**data, "rollout": rollout}, source="mismatch")


def _fresh_job(recipe: Recipe, rows: SampledRows, now: Path | None, locate: bool) -> ScoringJob:
    everything = np.arange(len(rows.tokens))
    return ScoringJob(
        **responses_of(rows),
        replayed=recipe.rollout.replay_experts,
        versions=(VersionRows(number=0, weights=recipe.model.path.absolute(), rows=tuple(everything.tolist())),),
        now=None if now is None else now.absolute(),
        searched=searched_rows(everything) if locate else (),
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
        job = _recorded_job(recorded, folders, locate)
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
            recipe.learner.num_processes, "launch.attribution.replay_ranks", str(run.path), str(source.path), wanted
        )
        run_ranks(run, command, log=run.logs / "replay.log", env=child_environment())
    return {version: found.get(version, recipe.model.path.absolute()) for version in versions}


def checkpoint_before(source: RunDirectory, version: int) -> int | None:
    """The step of the newest checkpoint that is not after `version`; None: all is trained again."""
    return max((step for step in source.saved_steps() if step <= version), default=None)


def _recorded_job(recorded: Recorded, folders: dict[int, Path], locate: bool) -> ScoringJob:
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
    return ScoringJob(
        **responses_of(rows),
        replayed=rows.experts is not None,
        versions=parts,
        former=parts[-2].weights if len(parts) > 1 else None,
        searched=searched_rows(newest) if locate else (),
    )


def _prefill(
    run: RunDirectory, recipe: Recipe, job: ScoringJob, recorded: Recorded, temperature: float
) -> tuple[NDArray[np.float64] | None, EngineCheck]:
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
    maker = checksums_maker(recipe)
    digests = None if maker is None else maker()

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


def searched_rows(candidates: NDArray[np.int64], most: int = MOST_SEARCHED_ROWS) -> tuple[int, ...]:
    """At most `most` of `candidates`, ascending, evenly spread: neighbors answer one prompt."""
    count = min(most, len(candidates))
    places = np.linspace(0, len(candidates) - 1, count).astype(np.int64)
    return tuple(candidates[places].tolist())


def describe(
    recipe: Recipe, source: str, kind: str, versions: tuple[int, ...], *, rows: SampledRows, prefilled: bool
) -> Setting:
    """The setting, and what could not be compared in it."""
    temperature = recipe.learner.temperature or recipe.rollout.temperature
    remarks = _routing_remarks(rows, replayed=recipe.rollout.replay_experts)
    if not prefilled:
        remarks.append(f"{_not_prefilled(recipe, rows, temperature)}: kernels are in the decoding term.")
    if temperature != recipe.rollout.temperature:
        remarks.append(
            f"The engine samples at temperature {recipe.rollout.temperature:g}, the learner trains the policy of "
            f"temperature {temperature:g}: that difference is in the decoding term."
        )
    return Setting(
        source=source,
        kind=kind,
        rollout_precision=recipe.rollout.precision,
        learner_precision=recipe.learner.precision,
        engine_dtype=engine_dtype(recipe),
        temperature=temperature,
        sampled_at=recipe.rollout.temperature,
        versions=versions,
        trains_formats=recipe.learner.fp8_emulation,
        remarks=tuple(remarks),
    )


def _not_prefilled(recipe: Recipe, rows: SampledRows, temperature: float) -> str:
    """Why the engine did not score what it sampled."""
    if rows.experts is not None:
        return "An engine that scores a row chooses experts anew"
    if recipe.rollout.asks_for_kept_sets:
        return "SGLang scores prompts over the whole vocabulary alone, the learner what top_p and top_k kept"
    return f"SGLang scores prompts at temperature 1 alone, and the learner's is {temperature:g}"


def _routing_remarks(rows: SampledRows, *, replayed: bool) -> list[str]:
    """Of a mixture: whose experts the scores are with, and of how many tokens the engine could say them."""
    if rows.experts is None:
        return []
    unknown = 1.0 - rows.experts.known.sum() / max(1, len(rows.experts) - len(rows.tokens))
    found = ["The learner trains with the engine's experts: routing is no difference."] if replayed else []
    if unknown > 0:
        found.append(
            f"Of {unknown:.0%} of the tokens the engine could not say the experts any more: their routing is in the "
            "decoding term."
        )
    return found


def _tensor(values: Flat, kept: NDArray[np.bool_]) -> Tensor:
    return torch.from_numpy(values[kept])
