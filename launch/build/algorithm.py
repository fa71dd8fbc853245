"""From a recipe to what a learner trains with: its objective behind its correction, and what is scored for it."""

from __future__ import annotations

from pipeline.config.recipe import Recipe
from pipeline.trainer.scoring import Scoring
from precision.objectives.base import Objective
from precision.reference import near


def build_objective(recipe: Recipe) -> Objective:
    """The recipe's objective, with its correction, held near its reference."""
    return near(recipe.correction.applied_to(recipe.objective), recipe.reference)


def build_scoring(recipe: Recipe) -> Scoring:
    """What the recipe's objective and its sizes of steps read of scored batches."""
    objective, by_ess = build_objective(recipe), recipe.learner.optimizer.lr_by_lag == "ess"
    return Scoring(
        prepares=objective.needs_scoring,
        reads_step=objective.reads_step_logprobs,
        reads_old=objective.needs_old_logprobs or by_ess,
        sizes_steps=by_ess,
    )


def scoring_passes(recipe: Recipe) -> int:
    """How often each batch is scored, by the reference too. Where older versions are kept: one that is stale, and was
    sampled by one of them."""
    older = recipe.schedule.kind == "staged" or recipe.learner.updates_per_batch > 1 or recipe.num_kept_versions > 0
    return build_scoring(recipe).passes(older=older) + (recipe.reference is not None)
