"""A recipe builds what it names, with the recipe's numbers."""

from __future__ import annotations

from typing import Any

import pytest

from launch.build.components import build_objective
from pipeline.advantages.compute import AdvantageComputer
from pipeline.config.algorithm import ADVANTAGES, CORRECTIONS, OBJECTIVES
from pipeline.config.recipe import Recipe
from precision.corrections import TIS, Corrected
from precision.objectives.clipped import Clipped
from tests.support.runs import a_recipe


def recipe(**sections: Any) -> Recipe:
    return a_recipe(**sections)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_without_correction_is_the_section_itself(name: str) -> None:
    made = recipe(objective=dict(name=name))
    assert build_objective(made) is made.objective
    assert type(made.objective) is OBJECTIVES[name]


@pytest.mark.parametrize("name", [name for name in CORRECTIONS if name != "none"])
def test_a_correction_stands_around_its_objective_and_costs_a_pass(name: str) -> None:
    objective = build_objective(recipe(objective=dict(name="clipped", anchor="old"), correction=dict(name=name)))
    assert isinstance(objective, Corrected)
    assert (objective.inner, type(objective.correction)) == (Clipped(anchor="old"), CORRECTIONS[name])
    assert objective.facts.needs_scoring
    assert objective.facts.needs_old_logprobs


def test_the_recipe_s_numbers_arrive() -> None:
    made = recipe(
        objective=dict(name="clipped", anchor="old", clip_high=0.28),
        correction=dict(name="tis", cap=1.5, level="token"),
    )
    assert build_objective(made) == Corrected(inner=Clipped(anchor="old", clip_high=0.28), correction=TIS(cap=1.5))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_advantage_is_built(name: str) -> None:
    made = recipe(advantage=dict(name=name))
    computer = AdvantageComputer.of(made)
    assert type(computer.section) is ADVANTAGES[name]
    assert computer.max_new_tokens == made.rollout.max_new_tokens
