"""`evenkeel recipe` tells what cannot act, beside the recipe and not in it."""

from __future__ import annotations

from pathlib import Path

import yaml
from typer.testing import CliRunner

from launch.cli import app

GRPO = str(Path(__file__).parents[3] / "pipeline" / "recipes" / "grpo_32b.yaml")


def test_a_clip_that_cannot_act_is_told_on_stderr() -> None:
    result = CliRunner().invoke(app, ["recipe", GRPO, "--set", "learner.updates_per_batch=1"])
    assert result.stderr.splitlines()[1].startswith("warning: the clip of objective clipped never acts")
    assert yaml.safe_load(result.stdout)["learner"]["updates_per_batch"] == 1


def test_of_a_recipe_without_such_a_thing_only_the_files_are_told() -> None:
    said = "recipe: the shipped grpo_32b.yaml, which extends the shipped qwen3_32b.yaml\n"
    assert CliRunner().invoke(app, ["recipe", GRPO]).stderr == said
