"""Which clips cannot act, and that no recipe that comes with Even Keel has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.config.loader import load_recipe
from pipeline.config.recipe import advice
from tests.support.runs import a_recipe

RECIPES = Path(__file__).parents[4] / "pipeline" / "recipes"
OLD = dict(name="clipped", anchor="old")
ASYNC = dict(kind="async", lag=2)


def test_each_source_needs_a_prompt_of_the_evaluation() -> None:
    sources = "task={name: data, sources: [{path: a.jsonl}, {path: b.jsonl}, {path: c.jsonl}]}"
    said = [advice(load_recipe(Path("demo"), [sources, f"evaluation.prompts={count}"])) for count in (2, 3)]
    assert said[1] == []
    assert said[0] == ["evaluation.prompts is 2, and task.sources are 3: some are never measured; set it to 3 or more"]


@pytest.mark.parametrize(
    ("objective", "schedule", "updates", "acts"),
    [
        (OLD, dict(kind="sync"), 1, False),
        (OLD, ASYNC, 1, False),
        (OLD, ASYNC, 2, True),
        (OLD, dict(kind="staged", updates_per_stage=4), 1, True),
        (OLD, dict(kind="staged", updates_per_stage=1), 1, False),
        (dict(name="gspo", anchor="old"), ASYNC, 1, False),
        (dict(name="decoupled"), ASYNC, 1, False),
        (dict(name="decoupled"), ASYNC, 4, True),
        (dict(name="clipped"), dict(kind="sync"), 1, True),
        (dict(name="p3o"), dict(kind="sync"), 1, True),
    ],
)
def test_a_clip_needs_an_old_policy_that_is_older(
    objective: dict[str, Any], schedule: dict[str, Any], updates: int, acts: bool
) -> None:
    recipe = a_recipe(objective=objective, schedule=schedule, learner=dict(updates_per_batch=updates))
    told = advice(recipe)
    assert bool(told) != acts
    assert acts or "updates_per_batch above 1" in told[0]


@pytest.mark.parametrize(("schedule", "acts"), [(ASYNC, True), (dict(kind="sync"), False)])
def test_the_policy_that_sampled_is_older_with_lag_alone(schedule: dict[str, Any], acts: bool) -> None:
    recipe = a_recipe(objective=dict(name="decoupled"), schedule=schedule, learner=dict(old_logprobs_at="sampling"))
    assert recipe.num_kept_versions == (2 if acts else 0)
    assert bool(advice(recipe)) != acts
