"""How long a learner needs to end in order: the rest of its step, a publish and a save that are under way, and a
checkpoint of what was trained meanwhile.

A scheduler that ends a job gives notice of so many seconds (Slurm's `--signal`, Kubernetes' termination grace period).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from launch.plan.planner import Machine, Planner, default_assumptions
from megatron_bridge.hf.model_config import ModelConfig
from pipeline.config.loader import find_recipe
from pipeline.config.recipe import Recipe

SAFETY = 2.0
"""The durations are guesses by roofline; notice that is too short costs the steps since the last checkpoint."""
FIXED_S = 60
"""For what depends on no size: signals, process groups that close, metadata of the shared file system."""


@dataclass(frozen=True, kw_only=True)
class StopTime:
    """Seconds that an orderly end may take."""

    step_s: float
    publish_s: float
    save_s: float
    disk_gb_s: float
    """At which saves are planned to write."""

    @property
    def grace_s(self) -> int:
        """What to ask of the scheduler: whole tens of seconds."""
        planned = SAFETY * (self.step_s + self.publish_s + 2 * self.save_s) + FIXED_S
        return 10 * math.ceil(planned / 10)


def stop_time(recipe_path: Path, recipe: Recipe, disk_gb_s: float | None = None, sizes: Path | None = None) -> StopTime:
    """Of a recipe's learner. Needs config.json of the model, as `evenkeel plan` does, or that in the folder `sizes`.
    Raises ModelError, and RecipeError for a `disk_gb_s` that is no speed."""
    gpus = recipe.learner.num_processes + recipe.rollout.engines * recipe.rollout.tensor_parallel
    assumed = default_assumptions(recipe, dict(disk_gb_s=disk_gb_s))
    machine = Machine(gpus=gpus, gpu_gib=80.0)  # none of these times depends on it
    return planned_stop_time(Planner(find_recipe(recipe_path), recipe, machine, assumed, sizes))


def planned_stop_time(planner: Planner) -> StopTime:
    """Of the learner of a plan."""
    timed = planner.durations(planner.recipe.learner)
    return StopTime(
        step_s=timed.score_s + timed.update_s,
        publish_s=timed.publish_s,
        save_s=checkpoint_bytes(planner.config, planner.recipe) / (planner.assumed.disk_gb_s * 1e9),
        disk_gb_s=planner.assumed.disk_gb_s,
    )


def checkpoint_bytes(config: ModelConfig, recipe: Recipe) -> int:
    """Parameters, their float32 main copies where they are no float32 themselves, two moments, and the older versions
    that the learner keeps."""
    size = recipe.learner.parameter_bytes
    return config.num_parameters * (size + (0 if size == 4 else 4) + 8 + recipe.num_kept_versions * size)
