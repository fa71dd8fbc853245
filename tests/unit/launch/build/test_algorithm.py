"""A recipe builds what it names, with the recipe's numbers."""

from __future__ import annotations

from typing import Any

import pytest

from launch.build.components import build_objective
from pipeline.config.algorithm import CORRECTIONS
from pipeline.config.recipe import Recipe
from precision.corrections import TIS, Corrected
from precision.objectives.clipped import Clipped
from tests.support.runs import a_recipe


def recipe(**sections: Any) -> Recipe:
    return a_recipe(**sections)


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
