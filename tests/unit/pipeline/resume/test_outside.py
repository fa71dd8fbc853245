"""What a run reads outside of its directory and finds changed at its next start is told, once, and noted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.fork.fork import fork_run
from launch.verify.history import check_history
from pipeline.analysis.comparison import compare_runs
from pipeline.analysis.summary import summary
from pipeline.config.recipe import Recipe
from pipeline.data.event_log import EventLog, read_events
from pipeline.data.run_directory import RunDirectory
from pipeline.resume import note_outside
from tests.support.whole_runs import whole_run


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return whole_run(tmp_path)


@pytest.fixture
def recipe(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """With a reward in a package, and a model folder."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors").write_text("weights")
    (tmp_path / "code" / "judged").mkdir(parents=True)
    for name in ("__init__.py", "reward.py"):
        (tmp_path / "code" / "judged" / name).write_text("raise RuntimeError('nobody imports it')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
    task: dict[str, Any] = dict(name="data", path=str(tmp_path / "data.jsonl"), reward="judged.reward:score")
    data = run.recipe().model_dump(mode="json") | dict(task=task, model=dict(path=str(tmp_path / "m")))
    return Recipe.model_validate(data)


def noted(run: RunDirectory, recipe: Recipe, start: int) -> list[str]:
    return note_outside(run, recipe, EventLog(run.path, f"supervisor-{start:06}"))


def test_an_edited_reward_is_told_once(run: RunDirectory, recipe: Recipe, tmp_path: Path) -> None:
    assert noted(run, recipe, 1) == []
    assert noted(run, recipe, 2) == []
    (tmp_path / "code" / "judged" / "reward.py").write_text("def score(response):\n    return 1.0\n")
    [said] = noted(run, recipe, 3)
    assert "the code of the reward was changed since the last start (judged.reward:score/reward.py)" in said
    assert noted(run, recipe, 4) == []
    [event] = read_events(run.path, "files_changed")
    assert (event["what"], event["step"], event["files"]) == ("reward", 5, ["judged.reward:score/reward.py"])
    assert check_history(run.path)["damaged"] == []


def test_other_weights_are_told_and_the_same_bytes_anew_are_not(
    run: RunDirectory, recipe: Recipe, tmp_path: Path
) -> None:
    assert noted(run, recipe, 1) == []
    (tmp_path / "m" / "model.safetensors").write_text("weights")
    assert noted(run, recipe, 2) == []
    (tmp_path / "m" / "model.safetensors").write_text("WEIGHTS")
    [said] = noted(run, recipe, 3)
    assert "the weights that the run began with were changed since its last start (model.safetensors)" in said


def test_scores_of_two_rewards_are_not_one_number(run: RunDirectory, recipe: Recipe, tmp_path: Path) -> None:
    noted(run, recipe, 1)
    assert summary(run.path)["version_first"] == 0
    fork_run(run.path, Path("new"), 4)
    fork = RunDirectory(tmp_path / "new")
    (tmp_path / "code" / "judged" / "reward.py").write_text("def score(response):\n    return 1.0\n")
    assert len(noted(fork, recipe, 1)) == 1
    EventLog(fork.path, "collector-000001").event("evaluated", version=6, pass_at_1=0.9)
    found = summary(fork.path)
    assert (found["version_first"], found["version_last"]) == (4, 6)
    assert any("the reward was changed at step 4" in warning for warning in found["warnings"])
    codes = compare_runs([run.path, fork.path])["recipe"]["code of the reward"]
    assert len(set(codes)) == 2
