"""A run that is given more steps equals one that was begun with them: bitwise in the same layout, 1e-5 in another."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from pipeline.data.event_log import read_events, read_metrics
from pipeline.data.run_recipes import all_recipes
from tests.support.engine_forks import forked_engines
from tests.support.rank_programs import forked_programs
from tests.support.runs import evenkeel, evenkeel_json, make_model, make_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def distance(ours: Path, theirs: Path) -> float:
    """The largest difference of a weight."""
    left, right = (
        {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for folder in (ours, theirs)
    )
    assert left.keys() == right.keys() != set()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def test_an_extended_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """The run is extended to twice its steps in another layout; its replay, which only learns, had ended there too and
    is extended in the same one; a second replay learns all steps in one go."""
    steps = 1
    recipe = make_recipe(
        tmp_path,
        make_model(tmp_path / "model"),
        "run",
        run=dict(name="run", root=str(tmp_path / "runs"), steps=steps),
        learner=dict(optimizer=dict(lr=1e-3, warmup_steps=0, decay="cosine", decay_steps=8 * steps)),
        checkpoint=dict(every=steps),
        evaluation=dict(prompts=1, samples=1),
    )
    run = tmp_path / "runs" / "run"
    replay, extended = run.with_name("run-replay"), run.with_name("extended")
    one_rank = ("--set", "learner.tensor_parallel=1")
    with forked_engines():
        assert evenkeel_json("train", recipe)["steps"] == steps
    with forked_programs():
        assert evenkeel_json("train", "--replay", run)["bit_identical"]
    wider = ("--set", f"run.steps={2 * steps}", "--set", "learner.tensor_parallel=2")
    with forked_engines():
        assert evenkeel_json("train", recipe, *wider)["learner_layout"] == "TP2"
    with forked_programs():
        another_layout = evenkeel("train", "--replay", run, *one_rank)
        assert (another_layout.returncode, "differing_tensors" in another_layout.stdout) == (1, True)
        assert [line["step"] for line in read_metrics(replay)] == list(range(2 * steps))
        replay.rename(extended)
        assert evenkeel("train", "--replay", run, *one_rank).returncode == 1
    assert distance(extended / "model", replay / "model") == 0.0, "the same layout"
    assert 0.0 < distance(run / "model", replay / "model") < 1e-5, "another layout"
    assert distance(run / "model", tmp_path / "model") > 1e-3

    assert [(one.first_step, one.recipe.run.steps) for one in all_recipes(run)] == [(0, steps), (steps, 2 * steps)]
    changes = [event["changes"] for event in read_events(run, "recipe_changed")]
    assert changes == [{"learner.tensor_parallel": "1 → 2", "run.steps": f"{steps} → {2 * steps}"}]
    assert evenkeel_json("verify", "history", run)["ok"]
