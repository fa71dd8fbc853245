"""From a recipe to one engine's start parameters."""

from __future__ import annotations

from typing import Literal

from pipeline.recipe import Recipe
from pipeline.rundir import RunDirectory
from rollout_sglang.server import EngineSpec


def engine_spec(run: RunDirectory, recipe: Recipe, index: int, port: int, api_key: str) -> EngineSpec:
    """Engine `index`, serving the newest version that lies in a folder.

    That is the published one, but for the moments after a broadcast: then the engine is fed before it gets requests.
    """
    rollout = recipe.rollout
    version = run.newest_policy(run.published_version())
    fp32_head = ("--enable-fp32-lm-head",) if recipe.model.fp32_lm_head else ()
    return EngineSpec(
        model=run.policy_directory(version),
        port=port,
        precision=rollout.precision,
        dtype=engine_dtype(recipe),
        log=run.logs / f"engine-{index}.log",
        version=version,
        api_key=api_key,
        tensor_parallel=rollout.tensor_parallel,
        context_tokens=rollout.context_tokens,
        seed=recipe.run.seed + index,
        extra_args=(*fp32_head, *rollout.extra_args),
    )


def engine_dtype(recipe: Recipe) -> Literal["float32", "bfloat16"]:
    """Of activations, and of the weights that are not quantized."""
    return "bfloat16" if "bf16" in (recipe.rollout.precision, recipe.learner.precision) else "float32"
