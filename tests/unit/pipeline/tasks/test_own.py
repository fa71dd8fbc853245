"""A task of the user's own, by `package.module:Class`."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.loader import load_recipe
from pipeline.config.task_sections import OwnTask
from pipeline.errors import RecipeError
from pipeline.tasks import build_task

MODULE = """
from pipeline.tasks.task import GeneratedTask, Problem, uniform_int

class Double(GeneratedTask):
    characters = "0123456789="
    reward = "pipeline.rewards.verifiers:exact_match"

    def __init__(self, seed, most):
        super().__init__(name="double", seed=seed, num_prompts=1000)
        self.most = most

    def draw(self, rng):
        number = uniform_int(rng, 0, self.most)
        return Problem(text=f"{number}=", answer=str(2 * number))
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "doubling_task.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    text = "run: {name: r, steps: 1}\nmodel: {path: m}\n"
    path = tmp_path / "own.yaml"
    path.write_text(text + "task: {class: doubling_task:Double, options: {most: 500}}\n")
    return path


def test_a_class_by_its_name(recipe: Path) -> None:
    loaded = load_recipe(recipe)
    assert isinstance(loaded.task, OwnTask)
    task = build_task(loaded.task, seed=3)
    problem = task.problem(7)
    assert (problem, problem.answer) == (task.problem(7), str(2 * int(problem.text[:-1])))
    assert build_task(loaded.task, seed=3).problem(7) == problem


def test_it_is_frozen_as_it_was_written(recipe: Path) -> None:
    loaded = load_recipe(recipe)
    recipe.write_text(loaded.to_yaml(), encoding="utf-8")
    assert load_recipe(recipe) == loaded
    assert "class: doubling_task:Double" in loaded.to_yaml()


def test_it_replaces_another_task(recipe: Path) -> None:
    """In a file that extends one, and by --set, as for objectives."""
    other = recipe.with_name("other.yaml")
    other.write_text("extends: demo\ntask: {class: doubling_task:Double, options: {most: 5}}\n")
    for loaded in (load_recipe(other), load_recipe(Path("demo"), ["task.class=doubling_task:Double"])):
        assert isinstance(loaded.task, OwnTask)
        assert loaded.task.class_ == "doubling_task:Double"


def test_what_cannot_be_made_is_refused(recipe: Path) -> None:
    with pytest.raises(RecipeError, match=r"cannot be made \(TypeError: .*missing.*'most'\); it is called as Class"):
        build_task(load_recipe(recipe, ["task.options={}"]).task, seed=0)
    with pytest.raises(RecipeError, match="cannot be made \\(AttributeError"):
        build_task(OwnTask.model_validate({"class": "doubling_task:Nobody"}), seed=0)
