"""From the recipe's names to the mathematics: objective, correction, advantage."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pipeline.advantages import build_advantages
from pipeline.advantages.compute import AdvantageComputer
from pipeline.config.recipe import Recipe
from pipeline.config.section import Section

if TYPE_CHECKING:
    from precision.objectives.base import Objective

_OBJECTIVES = {
    "p3o": "p3o:P3O",
    "p4o": "p4o:P4O",
    "clipped": "clipped:Clipped",
    "cispo": "cispo:CISPO",
    "gspo": "gspo:GSPO",
    "mu_grpo": "mu_grpo:MuGRPO",
    "decoupled": "decoupled:Decoupled",
    "m2po": "m2po:M2PO",
    "dppo_tv": "dppo_tv:DPPOTV",
    "topr": "topr:TOPR",
}
"""Recipe name → class, whose fields are those of the recipe section."""

_CORRECTIONS = {
    "tis": "TIS",
    "mis": "MIS",
    "rejection": "Rejection",
    "icepop": "IcePop",
    "opsm": "OPSM",
}


def build_objective(recipe: Recipe) -> Objective:
    """The recipe's objective, with its correction."""
    module, name = _OBJECTIVES[recipe.objective.name].split(":")
    objective: Objective = _built(f"precision.objectives.{module}", name, recipe.objective)
    if recipe.correction.name == "none":
        return objective
    from precision.corrections.corrected import Corrected

    correction = _built("precision.corrections", _CORRECTIONS[recipe.correction.name], recipe.correction)
    corrected: Objective = Corrected(inner=objective, correction=correction)
    return corrected


def build_advantage_computer(recipe: Recipe) -> AdvantageComputer:
    """The recipe's advantages, from rewards to tokens."""
    return AdvantageComputer(
        section=recipe.advantage,
        estimator=build_advantages(recipe.advantage),
        max_new_tokens=recipe.rollout.max_new_tokens,
    )


def _built(module: str, name: str, section: Section) -> Any:
    return getattr(import_module(module), name)(**section.model_dump(exclude={"name"}))
