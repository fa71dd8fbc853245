"""Each number of a recipe is refused by range before anything is started, whatever it is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.loader import load_recipe, override_of
from pipeline.config.recipe import Recipe
from pipeline.errors import RecipeError

VALUES = (-1, 0, 2**31, 2**32, 2**63, 2**64, 1e308, 3.5e38, 1e-300, math.nan, math.inf, -math.inf)
SECTIONS = {
    "controller": {},
    "reference": {"coefficient": 0.1},
    "distillation": {"path": "teacher", "coefficient": 0.1},
    "rollout.interruption": {"from_tokens": 1, "to_tokens": 2, "answer_tokens": 1},
    "reward.overlong": {"buffer_tokens": 2},
    "episode": {"tools": ["python"]},
}
"""Sections that a recipe need not have, with what they need."""


@cache
def numbers() -> list[tuple[str, str, str]]:
    """(key, choice that has it, integer or number) of every number in the schema."""
    schema = Recipe.model_json_schema()

    def below(part: dict[str, Any], key: str, choice: str) -> Iterator[tuple[str, str, str]]:
        if "$ref" in part:
            yield from below(schema["$defs"][part["$ref"].rpartition("/")[2]], key, choice)
        for one in (*part.get("anyOf", ()), *part.get("oneOf", ()), *part.get("allOf", ())):
            yield from below(one, key, choice)
        if part.get("type") in ("integer", "number"):
            yield key, choice, part["type"]
        for one in part.get("prefixItems", [part["items"]] if isinstance(part.get("items"), dict) else []):
            yield from below(one, f"{key}[]", choice)
        properties = part.get("properties", {})
        for name in ("name", "kind"):
            choice = str(properties.get(name, {}).get("const", choice))
        for name, one in properties.items():
            yield from below(one, f"{key}.{name}".lstrip("."), choice)

    return list(dict.fromkeys(below(schema, "", "")))


@cache
def _demo() -> dict[str, Any]:
    return load_recipe(Path("demo")).model_dump(mode="json")


def load_with(key: str, choice: str, value: float) -> Recipe:
    section = key.partition(".")[0]
    changes: dict[str, Any] = {name: given for name, given in SECTIONS.items() if key.startswith(f"{name}.")}
    if section in ("objective", "correction", "advantage"):
        changes[f"{section}.name"] = choice
        changes |= {"objective": {"name": "clipped", "anchor": "old"}} if section == "correction" else {}
    elif section == "schedule":
        changes["schedule.kind"] = choice
    elif section == "task":
        changes["task"] = {"name": choice} if choice != "data" else {"name": "data", "sources": [{"path": "x"}]}
    if key == "task.sources[].weight":
        changes["task"]["sources"][0]["weight"] = value
    elif key.endswith("[]"):
        changes[key.removesuffix("[]")] = [value, 0.5]
    else:
        changes[key] = value
    return load_recipe(_demo(), [override_of(*change) for change in changes.items()])


@pytest.mark.parametrize(("key", "choice", "kind"), numbers())
def test_a_number_beyond_what_the_parts_take_is_refused_by_its_key(key: str, choice: str, kind: str) -> None:
    most = 2**31 - 1 if kind == "integer" else 2e6 if key.endswith("_s") else 3e38
    for value in VALUES:
        refused = None
        try:
            load_with(key, choice, value)
        except RecipeError as error:
            refused = str(error)
        if refused is None:
            assert value == 0 or 2**-126 <= abs(value) <= most, value
            assert value >= 0 or key in ("rollout.top_k", "reward.solved_at"), value
        else:
            assert key.partition("[")[0].rpartition(".")[2] in refused
            assert "\n" not in refused


@pytest.mark.parametrize(
    "key", ["run.steps", "learner.optimizer.lr", "rollout.port", "learner.temperature", "objective.cap"]
)
def test_true_is_no_number(key: str) -> None:
    with pytest.raises(RecipeError, match=f"{key.rpartition('.')[2]} is true, expected a number"):
        load_with(key, "cispo", True)
