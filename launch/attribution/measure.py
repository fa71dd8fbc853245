"""Attribute the mismatch of learner and engine, for fresh rollouts or a recorded batch: `evenkeel mismatch`.

RECIPE: an engine samples the task's prompts, and learner and engine score the samples.

    model.path ─▶ version 0 in the rollout's format ─▶ engine: sample, prefill, checksums
         └──────▶ learner: plain, with the formats layer by layer, with known faults; with the weights of --now

RUN: a recorded batch of a run. The learner's scores are those that the run kept when it trained on the batch. Training
again is bit-identical for the layout and machine that trained. The run itself is only read.

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
from dataclasses import asdict, dataclass, field, replace
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


@dataclass
class Recorded:
    """A batch with the learner's scores from before it trained on the batch."""

    index: int
    batch: Batch
    now: NDArray[np.float64]
    """[responses] NaN where the learner did not score, and in rows that are left out."""
    rows_left_out: int = 0

    counts: NDArray[np.bool_] = field(init=False)
    """[responses] True for tokens that an engine sampled and the learner scored."""
    versions: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = np.asarray(self.batch.loss_mask & np.isfinite(self.now))
        self.versions = tuple(np.unique(self.batch.policy_version[self.counts]).tolist())

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
    """Attribute fresh rollouts of a recipe or a recorded batch; write both reports into `out`. Raises FatalError."""
    is_run = (source / "recipe.yaml").is_file()
    of_recipes = {"--prompts": num_prompts, "--now": now, "--set": list(overrides) or None}
    belongs_to = "a recipe" if is_run else "a run directory"
    for option, value in (of_recipes if is_run else {"--batch": batch}).items():
        if value is not None:
            raise RecipeError(f"{option} belongs to {belongs_to}; leave it out, or give {belongs_to}")
    if is_run:
        measured = measure_run(source, batch=batch, locate=locate)
        name, root = source.name, source.parent
    else:
        recipe = load_recipe(source, overrides)
        count = num_prompts or recipe.rollout.prompts_per_batch
        measured = measure_recipe(recipe, num_prompts=count, now=now, locate=locate)
        name, root = recipe.run.name, recipe.run.root
    result = measured.result()
    found = findings(result)
    result["cause"] = asdict(found[0]) if found else None
    result |= dict(findings=[asdict(one) for one in found], verdict=verdict(result, found))
    folder = out or root / f"{name}-mismatch"
    page = write_page(result, folder)
    write_atomically(folder / "mismatch.json", json.dumps(result) + "\n")
    return {**result, "page": str(page)}


def assembled(
    setting: Setting,
    audit: EngineCheck,
    *,
    rows: SampledRows,
    version: NDArray[np.int64],
    counts: NDArray[np.bool_],
    now: Flat | None,
    prefill: Flat | None,
    learner: Mapping[str, Flat],
    job: ScoringJob,
) -> Measured:
    """Combine the scores of the tokens that count; all arrays are over the response tokens of all rows.

    version    the version that sampled each token
    counts     False for tokens that no engine sampled or the learner never scored
    now        the learner's scores at the trained weights; None: at those that sampled
    prefill    the engine's scores at the version that sampled; None: not available
    learner    the arrays that launch.attribution.score_ranks wrote for `job`
    """
    newest, row = job.versions[-1].number, rows.row
    names = {name.removeprefix(f"{newest}.") for name in learner if name.startswith(f"{newest}.")}

    def scored(name: str) -> Flat:
        """Return the learner's values of each token at the version that sampled it, else NaN."""
        values = np.full(len(version), np.nan)
        for part in job.versions:
            here = np.isin(row, part.rows)
            values[here] = np.where(version[here] == part.number, learner[f"{part.number}.{name}"], values[here])
        return values

    def tensor(values: Flat | None) -> Tensor | None:
        return None if values is None else torch.from_numpy(values[counts])

    layers = sorted(int(name.removeprefix("layer.")) for name in names if name.startswith("layer."))
    in_search = np.isin(row, job.searched)
    tried = np.asarray(in_search & (version == newest) & counts)
    effects = {
        name.removeprefix("effect."): values[tried[in_search]]
        for name, values in learner.items()
        if name.startswith("effect.")
    }
    if job.searched and not effects:
        remark = "The search for known faults failed, for want of memory perhaps; --no-locate leaves it out."
        setting = replace(setting, remarks=(*setting.remarks, remark))
    then = torch.from_numpy(scored("then")[counts])
    return Measured(
        setting=setting,
        scores=TokenScores(
            now=then if now is None else torch.from_numpy(now[counts]),
            then=then,
            quantized=tensor(scored("quantized") if "quantized" in names else None),
            routed=tensor(scored("routed") if "routed" in names else None),
            prefill=tensor(prefill),
            decode=torch.from_numpy(rows.decode[counts]),
        ),
        position=np.concatenate([np.arange(length) for length in rows.lengths]).astype(np.int64)[counts],
        entropy=scored("entropy")[counts],
        layer_steps={layer: scored(f"layer.{layer}")[counts] for layer in layers},
        searched=tried[counts],
        effects=effects,
        audit=audit,
    )


def measure_recipe(recipe: Recipe, *, num_prompts: int, now: Path | None, locate: bool) -> Measured:
    """Sample `num_prompts` prompts and attribute their mismatch. `now` is an HF folder of the trained weights, by
    default those that the engine serves; `locate` tries known faults. Raises FatalError."""
    preflight(recipe)
    check_engines(recipe)
    with tempfile.TemporaryDirectory(prefix="evenkeel-mismatch-") as scratch:
        # Engines of a mixture report their experts, whatever the learner trains with.
        mixture = ModelConfig.from_hf(read_hf_config(recipe.model.path)).experts is not None
        local = moved(recipe, Path(scratch), replay_experts=mixture)
        run = RunDirectory(local.directory)
        run.freeze(local)
        seed_policy(run, local)
        temperature = local.learner.temperature or local.rollout.temperature
        with MeasuredEngine(run, local) as engine:
            rows = engine.sample_task(num_prompts)
            prefill = engine.score(rows, temperature)
            audit = engine.audit
        everything = np.arange(len(rows.tokens))
        version = VersionRows(number=0, weights=recipe.model.path.absolute(), rows=tuple(everything.tolist()))
        job = ScoringJob(
            **responses_of(rows),
            replayed=recipe.rollout.replay_experts,
            versions=(version,),
            now=None if now is None else now.absolute(),
            searched=searched_rows(everything) if locate else (),
        )
        learner = score_in_ranks(run, local, job, rows.experts)
    return assembled(
        describe(recipe, recipe.run.name, "fresh", (0,), rows=rows, prefilled=prefill is not None),
        audit,
        rows=rows,
        version=np.zeros(len(rows.decode), np.int64),
        counts=np.ones(len(rows.decode), np.bool_),
        now=learner.get("now"),
        prefill=prefill,
        learner=learner,
        job=job,
    )


def moved(recipe: Recipe, root: Path, **rollout: Any) -> Recipe:
    """Return the recipe for a run below another folder, with other rollout settings."""
    data = recipe.model_dump(mode="json")
    changed = dict(run={**data["run"], "root": str(root)}, rollout={**data["rollout"], **rollout})
    return recipe_from({**data, **changed}, source="mismatch")


def measure_run(path: Path, *, batch: int | None, locate: bool) -> Measured:
    """Attribute batch `batch` of a run, by default the newest trained one. Raises FatalError."""
    source = RunDirectory(path)
    recipes = all_recipes(path)  # first, since it refuses a run of another format
    recorded = read(source, batch)
    sampled_by = [one for one in recipes if one.first_batch <= recorded.index][-1]  # for a fork, possibly its parent's
    recipe = sampled_by.recipe
    check_engines(recipe)
    require_first_map(source, recorded, sampled_by)
    refuse_learned_otherwise(source, recorded, recipes, sampled_by)
    with tempfile.TemporaryDirectory(prefix="evenkeel-mismatch-") as scratch:
        local = moved(recipe, Path(scratch))
        run = RunDirectory(local.directory)
        run.freeze(local)
        folders = weights_of(source, run, local, recorded.versions)
        rows, version = recorded.rows(), recorded.batch.policy_version
        parts = tuple(
            VersionRows(
                number=number,
                weights=folder,
                rows=tuple(np.unique(rows.row[recorded.counts & (version == number)]).tolist()),
            )
            for number, folder in folders.items()
        )
        job = ScoringJob(
            **responses_of(rows),
            replayed=rows.experts is not None,
            versions=parts,
            former=parts[-2].weights if len(parts) > 1 else None,
            searched=searched_rows(np.array(parts[-1].rows, np.int64)) if locate else (),
        )
        learner = score_in_ranks(run, local, job, recorded.batch.experts)
        temperature = local.learner.temperature or local.rollout.temperature
        prefill, audit = _prefill(run, local, job, recorded, temperature)
    name = f"{path.name}, batch {recorded.index}"
    setting = describe(recipe, name, "recorded", recorded.versions, rows=rows, prefilled=prefill is not None)
    if recorded.rows_left_out:
        remark = f"Attributed are {MOST_ROWS} rows, evenly spread; {recorded.rows_left_out:,} more are left out."
        setting = replace(setting, remarks=(*setting.remarks, remark))
    return assembled(
        setting,
        audit,
        rows=rows,
        version=version.astype(np.int64),
        counts=recorded.counts,
        now=recorded.now,
        prefill=prefill,
        learner=learner,
        job=job,
    )


def read(source: RunDirectory, index: int | None) -> Recorded:
    """Read a batch and the learner's scores. Raises StoreError before it is trained."""
    store = BatchStore(source.batches)
    scored = {int(path.stem) for path in source.logprobs.glob("*.npy") if _STEP.fullmatch(path.stem)}
    trained = sorted(scored & {*store.committed()})
    wanted = max(trained, default=0) if index is None else index
    if wanted not in trained:
        raise StoreError(
            f"{source.path} has not trained on batch {wanted}, or what it takes was removed (run.keep_batches, "
            f"run.keep_logprobs); it is there of {f'{trained[0]} to {trained[-1]}' if trained else 'none'}; give "
            "--batch one of these, or train on"
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
    row = np.repeat(np.arange(recorded.batch.num_samples), np.diff(recorded.batch.response_offsets))
    every = np.unique(row[recorded.counts])
    chosen = searched_rows(every, MOST_ROWS)
    now = np.where(np.isin(row, chosen), recorded.now, np.nan)
    return replace(recorded, now=now, rows_left_out=len(every) - len(chosen))


def require_first_map(source: RunDirectory, recorded: Recorded, sampled_by: RecipeInForce) -> None:
    """Raise StoreError when the ESS controller may have changed the engines' formats before the batch was sampled:
    engines change one by one, so a token's formats are unknown."""
    if sampled_by.recipe.controller is None:
        return  # the records of a fork are its parent's
    control = ControlFiles(source.control, source.fence)
    changed = [record for record in control.decisions() if record.state.quant_map > 0]
    begun = control.read(sampled_by.first_step - 1) if sampled_by.first_step else None
    if begun is not None and begun.state.quant_map == 0:  # a fork's controller started anew
        changed = [record for record in changed if record.step >= sampled_by.first_step]
    first = changed[0].step + 1 if changed else math.inf  # the decision's version
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
    """Raise RunConflictError when the needed steps were trained by another recipe than the one to train them again."""
    if not (wanted := [version for version in recorded.versions if version > 0]):
        return
    first = checkpoint_before(source, min(wanted)) or 0
    if (changed := learned_otherwise(recipes, range(first, max(wanted)), sampled_by)) is not None:
        raise RunConflictError(
            f"batch {recorded.index} of {source.path} cannot be measured: its weights are made by training steps "
            f"{first} to {max(wanted) - 1} again, but {changed}; give --batch one with a checkpoint since then at or "
            "before its versions, or measure the run that it is a fork of"
        )


def weights_of(source: RunDirectory, run: RunDirectory, recipe: Recipe, versions: tuple[int, ...]) -> dict[int, Path]:
    """Return the HF folder of each version in full precision: the run's first model, or trained again into `run`."""
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
    """Return the step of the newest checkpoint up to `version`, or None without one."""
    return max((step for step in source.saved_steps() if step <= version), default=None)


def _prefill(
    run: RunDirectory, recipe: Recipe, job: ScoringJob, recorded: Recorded, temperature: float
) -> tuple[NDArray[np.float64] | None, EngineCheck]:
    """Score [responses] on the engine with the version that sampled each token, and audit the engine."""
    for part in job.versions:
        maker = checksums_maker(recipe)
        digests = None if maker is None else maker()

        def write_check(folder: Path, part: VersionRows = part, digests: Any = digests) -> None:
            WeightCheck(version=part.number, digests=() if digests is None else digests.digests()).save(folder)

        write_policy(
            TensorFolder(part.weights).tensors(),
            recipe.model.path,
            run.policy_directory(part.number),
            build_quant_map(recipe),
            digests=digests,
            beside=write_check,
        )
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


def searched_rows(candidates: NDArray[np.int64], most: int = MOST_SEARCHED_ROWS) -> tuple[int, ...]:
    """Choose at most `most` of `candidates`, ascending, evenly spread since neighbors answer one prompt."""
    count = min(most, len(candidates))
    places = np.linspace(0, len(candidates) - 1, count).astype(np.int64)
    return tuple(candidates[places].tolist())


def describe(
    recipe: Recipe, source: str, kind: str, versions: tuple[int, ...], *, rows: SampledRows, prefilled: bool
) -> Setting:
    """Describe the comparison, with remarks on what it lacks."""
    temperature = recipe.learner.temperature or recipe.rollout.temperature
    remarks = []
    if rows.experts is not None:
        if recipe.rollout.replay_experts:
            remarks.append("The learner trains with the engine's experts: routing is no difference.")
        unknown = 1.0 - rows.experts.known.sum() / max(1, len(rows.experts) - len(rows.tokens))
        if unknown > 0:
            remarks.append(
                f"Of {unknown:.0%} of the tokens the engine could not say the experts any more: their routing is in "
                "the decoding term."
            )
    if not prefilled:
        reason = f"SGLang scores prompts at temperature 1 alone, and the learner's is {temperature:g}"
        if rows.experts is not None:
            reason = "An engine that scores a row chooses experts anew"
        elif recipe.rollout.asks_for_kept_sets:
            reason = "SGLang scores prompts over the whole vocabulary alone, the learner what top_p and top_k kept"
        remarks.append(f"{reason}: kernels are in the decoding term.")
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
