"""What a run may not begin with, though earlier versions let it: such runs are still read, shown and gone on with."""

from __future__ import annotations

from pipeline.config.recipe import Recipe
from pipeline.errors import RecipeError


def check_new_run(recipe: Recipe) -> None:
    """Raises RecipeError."""
    if recipe.reward.overlong is not None and recipe.advantage.asks_what_is_solved:
        raise RecipeError(
            f"advantage.name is {recipe.advantage.name}, which asks how far a sample is solved, from 0 to 1: with "
            "reward.overlong a long right answer would count as unsolved, and a long wrong one lose nothing; set "
            "reward.overlong=null, and advantage.truncated=exclude in its place"
        )
    optimizer = recipe.learner.optimizer
    if optimizer.decay != "constant" and optimizer.min_lr > optimizer.lr:
        raise RecipeError(
            f"learner.optimizer.min_lr {optimizer.min_lr:g} is above lr {optimizer.lr:g}, so that the rate would rise; "
            "lower it"
        )
