"""What the collector checks before it waits for engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.roles.collector import run_collector
from launch.run.waiting import Stop
from pipeline.config.recipe import Recipe
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RecipeError
from tests.support.runs import make_prompts


def test_a_reward_that_cannot_be_imported_is_said_before_engines_are_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts(tmp_path / "prompts.jsonl")
    data = dict(
        run=dict(name="x", root=str(tmp_path), steps=1),
        model=dict(path="m"),
        task=dict(name="data", path=str(prompts), reward="nowhere.at_all:reward"),
        rollout=dict(start_deadline_s=600.0),
        evaluation=dict(prompts=1),
        reward=dict(sandbox="none"),
    )
    run = RunDirectory(tmp_path / "x")
    run.freeze(Recipe.model_validate(data))
    monkeypatch.setattr("launch.roles.collector.wait_for_policy", lambda *_: pytest.fail("it waits"))
    with pytest.raises(RecipeError, match=r"reward 'nowhere.at_all:reward' cannot be imported"):
        run_collector(run, Stop())
