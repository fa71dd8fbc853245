"""Every name of a recipe builds what it names, and the recipe knows what that costs."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from launch.build.algorithm import build_advantage_computer, build_objective
from pipeline.config import algorithm
from pipeline.config.algorithm import AdvantageSection, CorrectionSection, ObjectiveSection, scores_step
from pipeline.config.loader import recipe_from
from pipeline.config.recipe import Recipe


def names(union: Any) -> list[str]:
    sections = get_args(get_args(union)[0])
    return [name for section in sections for name in get_args(section.model_fields["name"].annotation)]


def recipe(**sections: Any) -> Recipe:
    base: dict[str, Any] = dict(run=dict(name="r", steps=8), model=dict(path="m"), task=dict(name="sort_digits"))
    return recipe_from(base | sections, source="test")


@pytest.mark.parametrize("name", names(ObjectiveSection))
def test_every_objective_is_built_with_the_recipes_numbers(name: str) -> None:
    made = recipe(objective=dict(name=name))
    objective = build_objective(made)
    for field, value in made.objective.model_dump(exclude={"name"}).items():
        assert getattr(objective, field) == value
    assert objective.needs_scoring == scores_step(made.objective, made.correction)


@pytest.mark.parametrize("anchor", ["rollout", "old"])
@pytest.mark.parametrize("name", ["clipped", "gspo"])
def test_the_recipe_knows_that_an_anchor_costs_a_pass(name: str, anchor: str) -> None:
    made = recipe(objective=dict(name=name, anchor=anchor))
    assert build_objective(made).needs_scoring == scores_step(made.objective, made.correction)


@pytest.mark.parametrize("change", [dict(ess_scope="micro_batch"), dict(ess_unit="sequence"), dict()])
def test_p3o_scores_the_step_for_its_step_scope(change: dict[str, Any]) -> None:
    made = recipe(objective=dict(name="p3o", **change))
    assert build_objective(made).needs_scoring == scores_step(made.objective, made.correction)


@pytest.mark.parametrize("name", [name for name in names(CorrectionSection) if name != "none"])
def test_every_correction_is_built_around_its_objective(name: str) -> None:
    made = recipe(objective=dict(name="clipped", anchor="old"), correction=dict(name=name))
    objective: Any = build_objective(made)
    for field, value in made.correction.model_dump(exclude={"name"}).items():
        assert getattr(objective.correction, field) == value
    assert objective.needs_scoring
    assert scores_step(made.objective, made.correction)


@pytest.mark.parametrize("name", names(AdvantageSection))
def test_every_advantage_is_built(name: str) -> None:
    made = recipe(advantage=dict(name=name))
    advantage_computer = build_advantage_computer(made)
    assert advantage_computer.section == made.advantage
    assert advantage_computer.max_new_tokens == made.rollout.max_new_tokens


def test_names_are_found() -> None:
    """Guards the tests above against an empty list."""
    assert {"p3o", "mu_grpo", "cispo", "gspo"} <= set(names(ObjectiveSection))
    assert {"grpo", "dr_grpo", "fade"} <= set(names(AdvantageSection))
    assert algorithm.NoCorrection().name in names(CorrectionSection)
