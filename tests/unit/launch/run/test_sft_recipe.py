"""The recipe of a run that fine-tunes: the recipe's model and learner, and the schedule of the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.run.sft import sft_recipe
from megatron_bridge.step.learning_rate import learning_rate
from pipeline.config.loader import load_recipe
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RecipeError


def rates(*overrides: str) -> list[float]:
    recipe = sft_recipe(load_recipe(Path("demo"), overrides), steps=300, lr=1e-5, warmup_steps=50)
    return [learning_rate(step, recipe.learner.optimizer, recipe.run.steps) for step in range(300)]


def test_the_rate_falls_linearly_to_zero_over_the_run_whatever_the_recipe_says() -> None:
    plain = rates()
    assert max(plain) == plain[49] == plain[50] == 1e-5
    assert plain[-1] == 0.0 < plain[-2]
    assert plain[174] == pytest.approx(0.5e-5, rel=0.01)
    keys = ("decay_steps=40", "decay=cosine", "min_lr=1e-6", "warmup_steps=7")
    assert rates(*(f"learner.optimizer.{key}" for key in keys)) == plain


def test_a_staged_recipe_may_have_fewer_steps_than_a_stage(tmp_path: Path) -> None:
    recipe = sft_recipe(load_recipe(Path("mu_grpo"), [f"run.root={tmp_path}"]), steps=20, lr=1e-5, warmup_steps=5)
    run = RunDirectory(recipe.directory)
    assert run.freeze(recipe) == run.recipe() == recipe
    assert run.path.name == "mu-grpo-sft"


@pytest.mark.parametrize("lr", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused_in_one_line(lr: float) -> None:
    with pytest.raises(RecipeError, match=r"^evenkeel sft.*learner\.optimizer\.lr"):
        sft_recipe(load_recipe(Path("demo")), steps=20, lr=lr, warmup_steps=5)
