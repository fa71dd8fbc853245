"""`evenkeel recipe` tells what cannot act, beside the recipe and not in it."""

from __future__ import annotations

from pathlib import Path

import yaml
from typer.testing import CliRunner

from launch.cli import app

GRPO = str(Path(__file__).parents[3] / "pipeline" / "recipes" / "grpo_32b.yaml")


def test_a_clip_that_cannot_act_is_told_on_stderr() -> None:
    result = CliRunner().invoke(app, ["recipe", GRPO, "--set", "learner.updates_per_batch=1"])
    assert result.stderr.startswith("warning: the clip of objective clipped never acts")
    assert yaml.safe_load(result.stdout)["learner"]["updates_per_batch"] == 1


def test_a_recipe_without_such_a_thing_is_printed_alone() -> None:
    assert CliRunner().invoke(app, ["recipe", GRPO]).stderr == ""
