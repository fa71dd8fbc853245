"""rollout.quant_map: a file that becomes a part of the recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline.config.loader import changed_keys, load_recipe, recipe_from
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RecipeError, RunConflictError
from precision.formats.quant_map import QuantMapFile

DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    (tmp_path / "map.yaml").write_text(f"base: fp8_block\nexceptions: {{{DOWN}: full}}\n")
    data = dict(
        run=dict(name="r", steps=8, root=str(tmp_path / "runs")),
        model=dict(path="m"),
        task=dict(name="sort_digits"),
        rollout=dict(precision="fp8_block", quant_map=str(tmp_path / "map.yaml")),
    )
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(data))
    return tmp_path / "recipe.yaml"


def test_its_content_is_frozen_and_the_file_is_not_needed_again(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    run = RunDirectory(recipe.directory)
    run.freeze(recipe)
    (recipe_file.parent / "map.yaml").unlink()
    assert run.recipe() == recipe
    assert run.recipe().rollout.quant_map == QuantMapFile(base="fp8_block", exceptions={DOWN: "full"})
    assert recipe_from(yaml.safe_load(recipe.to_yaml()), source="shown") == recipe
    with pytest.raises(RecipeError, match=r"rollout\.quant_map: cannot read quant map .*map\.yaml"):
        load_recipe(recipe_file)


def test_going_on_with_a_changed_map_names_the_layer(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    run = RunDirectory(recipe.directory)
    run.freeze(recipe)
    (recipe_file.parent / "map.yaml").write_text("base: fp8_block\n")
    changed = changed_keys(recipe, load_recipe(recipe_file))
    assert changed == {f"rollout.quant_map.exceptions.{DOWN}": "full → None"}
    with pytest.raises(RunConflictError, match=r"model\.layers\.1\.mlp\.down_proj: full → None"):
        run.freeze(load_recipe(recipe_file))


@pytest.mark.parametrize(
    ("text", "problem"), [("base: int4", "base: Input should be"), ("[", "line 1, column 2: not YAML")]
)
def test_a_file_that_says_something_else_is_refused_in_one_line(recipe_file: Path, text: str, problem: str) -> None:
    (recipe_file.parent / "map.yaml").write_text(text)
    with pytest.raises(RecipeError, match=problem) as refused:
        load_recipe(recipe_file)
    assert "\n" not in str(refused.value)
    assert "map.yaml" in str(refused.value)
