"""From a recipe to what a learner trains with: its objective behind its correction, and its advantages."""

from __future__ import annotations

from pipeline.advantages.compute import AdvantageComputer
from pipeline.config.recipe import Recipe
from precision.objectives.base import Objective
from precision.reference import near


def build_objective(recipe: Recipe) -> Objective:
    """The recipe's objective, with its correction, held near its reference."""
    return near(recipe.correction.applied_to(recipe.objective), recipe.reference)


def build_advantage_computer(recipe: Recipe) -> AdvantageComputer:
    """The recipe's advantages, from rewards to tokens."""
    return AdvantageComputer(
        section=recipe.advantage,
        estimator=recipe.advantage.estimator(),
        max_new_tokens=recipe.rollout.max_new_tokens,
        overlong=recipe.reward.overlong,
        distillation=recipe.distillation,
    )
