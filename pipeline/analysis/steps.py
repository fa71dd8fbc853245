"""What each step of a run cost, one row a step: the source of scaling curves and of comparisons.

metrics       its tokens, its seconds, and when it ended
committed     the samples of its batch
skipped/      its batch was lost by damage: it cost nothing, and the next version has the weights of this one
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.analysis.run_log import RunLog, number
from pipeline.config.recipe import Recipe
from pipeline.data.frozen.recipes import all_recipes, recipe_of_step


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step, trained or skipped. What no file tells any more is None."""

    samples: float | None
    tokens: float | None
    """Of responses."""
    hours: float | None
    """Accelerator-hours: every accelerator of the run over all phases of the step, waiting included."""
    ended: float | None
    """Seconds since 1970."""


def steps_of(run_log: RunLog) -> list[Step]:
    """Every step so far, from step 0 on."""
    lines = {int(line["step"]): line for line in run_log.metrics}
    samples = {int(event["batch"]): float(event["samples"]) for event in run_log.of_kind("committed")}
    skipped_at = {int(event["step"]): float(event["time"]) for event in run_log.of_kind("skipped")}
    skipped = set(run_log.skipped)
    recipes = all_recipes(run_log.run_dir, lambda _: None)  # what is unknown has been said
    return [
        Step(samples=0.0, tokens=0.0, hours=0.0, ended=skipped_at.get(step))
        if step in skipped
        else _trained(lines.get(step), samples.get(step), recipe_of_step(recipes, step))
        for step in range(run_log.num_steps)
    ]


def _trained(line: Mapping[str, Any] | None, samples: float | None, recipe: Recipe) -> Step:
    if line is None:
        return Step(samples=samples, tokens=None, hours=None, ended=None)
    return Step(
        samples=samples,
        tokens=number(line, "num_tokens"),
        hours=_accelerators(recipe) * _seconds(line) / 3600.0 if "seconds" in line else None,
        ended=float(line["time"]),
    )


def _seconds(line: Mapping[str, Any]) -> float:
    return sum(float(spent) for spent in line["seconds"].values())


def _accelerators(recipe: Recipe) -> int:
    """Of learner, engines and the teacher that the run starts. On a CPU machine a process is one."""
    rollout, teacher = recipe.rollout, recipe.started_teacher
    engines = rollout.engines * rollout.tensor_parallel
    return recipe.learner.num_processes + engines + (0 if teacher is None else teacher.tensor_parallel)
