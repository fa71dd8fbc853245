"""What a recipe says that cannot have an effect; such a recipe runs."""

from __future__ import annotations

from pipeline.config.recipe import Recipe
from pipeline.config.schedule_sections import AsyncSchedule, StagedSchedule
from pipeline.config.task_sections import DataTask


def advice(recipe: Recipe) -> list[str]:
    """One sentence for each such thing; most recipes have none."""
    return [sentence for sentence in (_clip_without_effect(recipe), _sources_without_evaluation(recipe)) if sentence]


def _sources_without_evaluation(recipe: Recipe) -> str | None:
    sources = recipe.task.sources if isinstance(recipe.task, DataTask) else ()
    if len(sources) <= recipe.evaluation.prompts:
        return None
    return (
        f"evaluation.prompts is {recipe.evaluation.prompts}, and task.sources are {len(sources)}: some are never "
        f"measured; set it to {len(sources)} or more"
    )


def _clip_without_effect(recipe: Recipe) -> str | None:
    """A clip of pi / pi_old acts only where pi_old is older than the step: after the first of several updates on a
    batch, in a stage of several batches, or where it is the policy that sampled."""
    if not recipe.objective.clips_by_old_ratio:
        return None
    staged = isinstance(recipe.schedule, StagedSchedule) and recipe.schedule.updates_per_stage > 1
    stale = isinstance(recipe.schedule, AsyncSchedule) and recipe.reads_sampling_logprobs
    if staged or stale or recipe.learner.updates_per_batch > 1:
        return None
    return (
        f"the clip of objective {recipe.objective.name} never acts: its ratio is pi / pi_old, and with one update a "
        "batch the policy is its own pi_old; set learner.updates_per_batch above 1 (4 is usual), with async "
        "learner.old_logprobs_at=sampling, or objective clipped with anchor=rollout"
    )
