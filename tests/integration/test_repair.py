"""A run that was damaged in many places stops with a message, and what the message advises brings it to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.data.event_log import read_events
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from tests.support.engine_forks import forked_engines
from tests.support.runs import evenkeel, evenkeel_json, make_model, make_recipe
from tests.support.whole_runs import damage

pytestmark = [pytest.mark.loop, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_damaged_run_is_repaired_and_goes_on(tmp_path: Path) -> None:
    """The checkpoint of step 4 is taken; batch 1 was learned from by it; batch 5 only by what engines serve."""
    make_model(tmp_path / "model")
    evaluation = dict(every=2, prompts=4, samples=2)
    recipe = make_recipe(tmp_path, tmp_path / "model", "worst", run=dict(name="worst", steps=6), evaluation=evaluation)
    with forked_engines():
        evenkeel_json("train", recipe)
        run = RunDirectory(tmp_path / "runs" / "worst")
        for name in ("batches/000001.zarr.zip", "batches/000005.zarr.zip", "checkpoints/000006", "model"):
            damage(run.path / name)
        damage(run.policy_directory(6))
        damage(run.evaluations / "000006.json")
        broken = evenkeel("verify", "history", run.path)
        assert broken.returncode != 0
        assert f"`evenkeel repair {run.path}`" in broken.stderr
        said = evenkeel("repair", run.path, "--apply")
        assert said.returncode == 0, said.stderr
        assert "the run goes on from step 4" in said.stdout
        evenkeel_json("train", recipe)
    assert {lost.index: lost.learned for lost in BatchStore(run.batches).all_lost()} == {1: True, 5: False}
    assert run.skipped_steps() == [5]
    assert [event["step"] for event in read_events(run.path, "skipped")] == [5]
    assert run.policy_directory(6).is_dir()
    history = evenkeel_json("verify", "history", run.path)
    assert history["ok"]
    assert len(history["lost_by_damage"]) == 2
    assert evenkeel_json("repair", run.path)["whole"]
    assert evenkeel_json("runs", "show", run.path)["steps"] == 6, "five trained, one skipped"
    replayed = evenkeel("train", "--replay", run.path)
    assert replayed.returncode == 1
    assert "batch 1 was lost by damage" in replayed.stderr
    assert replayed.stderr.count("\n") == 1
