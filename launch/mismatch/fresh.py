"""`evenkeel mismatch RECIPE`: an engine samples the task's prompts, and learner and engine score what it sampled.

model.path ─▶ version 0 in the rollout's format ─▶ engine: sample, prefill, checksums
     └──────▶ learner: plain, with the formats layer by layer, with known faults; with the weights of --now
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from launch.build.engines import check_engines
from launch.mismatch.assembly import Sides, describe, searched_rows
from launch.mismatch.engine import MeasuredEngine
from launch.mismatch.rows import SampledRows
from launch.mismatch.scoring import Job, VersionRows, responses_of, score_in_ranks
from launch.run.begin import preflight, seed_policy
from megatron_bridge.hf.model_config import ModelConfig, read_hf_config
from pipeline.analysis.mismatch.measured import Measured
from pipeline.config.loader import recipe_from
from pipeline.config.recipe import Recipe
from pipeline.data.run_directory import RunDirectory


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
        job = _job(recipe, rows, now, locate)
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


def _job(recipe: Recipe, rows: SampledRows, now: Path | None, locate: bool) -> Job:
    everything = np.arange(len(rows.tokens))
    return Job(
        **responses_of(rows),
        replayed=recipe.rollout.replay_experts,
        versions=(VersionRows(number=0, weights=recipe.model.path.absolute(), rows=tuple(everything.tolist())),),
        now=None if now is None else now.absolute(),
        searched=searched_rows(everything) if locate else (),
    )
