"""Shipped recipes for a CPU: what they say must fit their own tokenizer and model."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.build.components import (
    build_interruption,
    build_objective,
    build_prompts,
    build_solved_prompt_rule,
    build_tokenizer,
)
from pipeline.advantages.compute import AdvantageComputer
from pipeline.config.loader import load_recipe
from tests.support.runs import ROOT, make_model

RECIPES = ROOT / "pipeline" / "recipes"
FOR_A_CPU = sorted(path for path in RECIPES.glob("*.yaml") if "32b" not in path.stem and "a3b" not in path.stem)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("recipes") / "model")


@pytest.mark.parametrize("path", FOR_A_CPU, ids=lambda path: path.stem)
def test_a_recipe_for_a_cpu_fits_the_model_that_evenkeel_makes(path: Path, model: Path) -> None:
    recipe = load_recipe(path, [f"model.path={model}"])
    tokenizer = build_tokenizer(recipe)
    build_prompts(recipe, tokenizer)
    assert (build_interruption(recipe, tokenizer) is None) == (recipe.rollout.interruption is None)
    assert (build_solved_prompt_rule(recipe) is None) == (recipe.prompts.solved_pass_rate is None)
    build_objective(recipe)
    AdvantageComputer.of(recipe)
