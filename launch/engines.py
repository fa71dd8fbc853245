"""From a recipe to one engine's start parameters."""

from __future__ import annotations

from pipeline.recipe import Recipe
from pipeline.rundir import RunDirectory
from rollout_sglang.server import EngineSpec


def engine_spec(run: RunDirectory, recipe: Recipe, index: int, port: int, api_key: str) -> EngineSpec:
    """Engine `index`, serving the version that the run has published now."""
    rollout = recipe.rollout
    version = run.published_version()
    return EngineSpec(
        model=run.policy_directory(version),
        port=port,
        precision=rollout.precision,
        dtype="bfloat16" if "bf16" in (rollout.precision, recipe.learner.precision) else "float32",
        log=run.logs / f"engine-{index}.log",
        version=version,
        api_key=api_key,
        tensor_parallel=rollout.tensor_parallel,
        context_tokens=rollout.context_tokens,
        seed=recipe.run.seed + index,
        extra_args=rollout.extra_args,
    )
