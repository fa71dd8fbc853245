"""Shipped recipes at work: what they say must fit their own tokenizer and model, and the richest of them must run."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.build.components import (
    build_interruption,
    build_objective,
    build_prompts,
    build_solved_prompt_rule,
    build_tokenizer,
)
from pipeline.advantages.compute import AdvantageComputer
from pipeline.config.loader import load_recipe
from pipeline.data.event_log import read_events, read_metrics
from tests.support.engine_forks import forked_engines
from tests.support.runs import ROOT, evenkeel_json, make_model, make_prompts

RECIPES = ROOT / "pipeline" / "recipes"
FOR_A_CPU = sorted(path for path in RECIPES.glob("*.yaml") if "32b" not in path.stem and "a3b" not in path.stem)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("recipes") / "model")


@pytest.mark.parametrize("path", FOR_A_CPU, ids=lambda path: path.stem)
def test_a_recipe_for_a_cpu_fits_the_model_that_evenkeel_makes(path: Path, model: Path) -> None:
    recipe = load_recipe(path, [f"model.path={model}"])
    tokenizer = build_tokenizer(recipe)
    build_prompts(recipe, tokenizer)
    assert (build_interruption(recipe, tokenizer) is None) == (recipe.rollout.interruption is None)
    assert (build_solved_prompt_rule(recipe) is None) == (recipe.prompts.solved_pass_rate is None)
    build_objective(recipe)
    AdvantageComputer.of(recipe)


@pytest.mark.loop
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_scalerl_runs(model: Path, tmp_path: Path) -> None:
    """Everything of the paper at once: CISPO, FP32 head, FP8 rollouts, lag 8, interruptions, groups left out."""
    sets = {
        "run.root": tmp_path / "runs",
        "run.steps": 4,
        "model.path": model,
        "rollout.prompts_per_batch": 4,
        "task.name": "data",  # with a reward that a random model earns now and then
        "task.path": make_prompts(tmp_path / "prompts.jsonl"),
        "task.reward": "tests.support.rewards:digit_share",
        "evaluation.prompts": 2,
        "evaluation.samples": 2,
    }
    overrides = (part for key, value in sets.items() for part in ("--set", f"{key}={value}"))
    with forked_engines():
        numbers = evenkeel_json("train", RECIPES / "scalerl.yaml", *overrides)
    assert numbers["state"] == "finished"
    assert numbers["objective"] == "cispo"
    assert numbers["interrupted"] > 0, "a random model never ends by itself"
    run = tmp_path / "runs" / "scalerl"
    metrics = read_metrics(run)
    assert len(metrics) == 4
    assert max(line["lag_max"] for line in metrics) <= 8
    assert [event["version"] for event in read_events(run, "published")] == [1, 2, 3, 4]
    assert evenkeel_json("verify", "history", run)["ok"]
