"""`import evenkeel`: recipes, training, runs, batches and metrics from a program."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

import evenkeel
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import RecipeError, StoreError
from pipeline.tasks.character_tokenizer import write_character_tokenizer
from pipeline.tasks.tokenizer import Tokenizer
from tests.support.batches import CONTRACT, batch_of_rewards
from tests.support.runs import ROOT
from tests.support.written_runs import write_run


def test_a_recipe_by_name_with_changes() -> None:
    changes = {"run.steps": 7, "learner.optimizer.lr": 1e-4, "model.path": Path("somewhere"), "objective.name": "grpo"}
    with pytest.raises(RecipeError, match="grpo"):
        evenkeel.load_recipe("demo", changes)
    recipe = evenkeel.load_recipe("demo", changes | {"objective.name": "clipped", "rollout.urls": ["http://a:1"]})
    assert (recipe.run.steps, recipe.learner.optimizer.lr, recipe.objective.name) == (7, 1e-4, "clipped")
    assert (recipe.model.path, recipe.rollout.urls) == (Path("somewhere"), ("http://a:1",))
    with pytest.raises(evenkeel.EvenKeelError, match="did you mean demo"):
        evenkeel.load_recipe("demmo")
    task = {"task": {"name": "data", "path": "p.jsonl", "reward": "match", "chat_template": True}}
    recipe = evenkeel.load_recipe("demo", task | {"task.system_prompt": 'You say "Grüße 😀".'})
    assert recipe.task.system_prompt == 'You say "Grüße 😀".'


def test_metrics_are_columns(tmp_path: Path) -> None:
    run = evenkeel.Run(write_run(tmp_path, 5))
    metrics = run.metrics
    assert next(iter(metrics)) == "step"
    assert metrics["step"].dtype == np.int64
    assert metrics["step"].tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(metrics["reward_mean"], 0.2 + 0.02 * np.arange(5))
    assert metrics["seconds/update"].tolist() == [0.4] * 5
    assert {column.shape for column in metrics.values()} == {(5,)}
    assert pyarrow.table(metrics).num_rows == 5
    assert run.evaluations["version"].tolist() == [0, 5]
    assert run.evaluations["pass_at_k/8"].tolist() == [0.375, 0.75]
    assert (run.summary["steps"], run.recipe.run.steps) == (5, 24)
    assert {event["kind"] for event in run.events} >= {"started", "evaluated"}


def test_a_number_that_a_step_lacks_is_none_of_its_column(tmp_path: Path) -> None:
    from pipeline.data.event_log import EventLog

    path = write_run(tmp_path, 0)
    log = EventLog(path, "learner-000001")
    log.metrics(0, loss=1.0)
    log.metrics(1, k3_kl=0.5, name="x", bins=[1, 2], good=True)
    run = evenkeel.Run(path)
    assert list(run.metrics) == ["step", "time", "loss", "k3_kl"]
    assert run.metrics["loss"].tolist()[0] == 1.0
    assert np.isnan(run.metrics["loss"][1])
    log.metrics(2, loss=3.0)
    assert len(run.metrics["loss"]) == 3  # read anew


def test_batches_are_arrays(tmp_path: Path) -> None:
    path = write_run(tmp_path, 1)
    BatchStore(RunDirectory(path).batches).commit(batch_of_rewards([[0.0, 1.0], [1.0, 1.0]]))
    run = evenkeel.Run(path)
    assert run.batches == [0]
    assert run.batch(0).reward.tolist() == [0.0, 1.0, 1.0, 1.0]
    assert run.learner_logprobs(0) is None
    with pytest.raises(StoreError):
        run.batch(1)


def test_samples_are_texts_with_their_rewards(tmp_path: Path) -> None:
    write_character_tokenizer(tmp_path / "m", "0123456789=abcdefghijklmnopqrstuvwxyz")
    contract = replace(CONTRACT, tokenizer_sha256=Tokenizer.load(tmp_path / "m").sha256)
    path = write_run(tmp_path, 1, overrides=dict(model=dict(path=str(tmp_path / "m"))))
    batch = batch_of_rewards([[0.0, 1.0]], vocabulary=30, contract=contract)
    BatchStore(RunDirectory(path).batches).commit(batch)
    found = evenkeel.Run(path).samples(0)
    assert [one["reward"] for one in found] == [0.0, 1.0]
    expected = Tokenizer.load(tmp_path / "m").decode(batch.response_tokens.tolist(), special=True)
    assert "".join(one["response"] for one in found) == expected


def test_the_page_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block of docs/python.md that reads a run, but for its text: that takes a tokenizer."""
    path = write_run(tmp_path / "runs", 1)
    batch = batch_of_rewards([[0.0, 1.0], [1.0, 1.0]])
    BatchStore(RunDirectory(path).batches).commit(batch)
    RunDirectory(path).write_learner_logprobs(0, batch.rollout_logprobs - 0.5)
    [_, reading] = re.findall("```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evenkeel.Run, "samples", lambda run, index: [])
    names: dict[str, Any] = {}
    exec(reading, names)
    np.testing.assert_allclose(names["gap"], -0.5, rtol=1e-6)


def test_training_returns_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import launch.run.train

    monkeypatch.setattr(launch.run.train, "train_run", lambda recipe: write_run(tmp_path, 3, name=recipe.run.name))
    recipe = evenkeel.load_recipe("demo", {"run.root": tmp_path, "run.name": "mine"})
    assert evenkeel.train(recipe).metrics["step"].tolist() == [0, 1, 2]
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "recipe.yaml").write_text("no: recipe\n")
    assert [run.path.name for run in evenkeel.list_runs(tmp_path)] == ["mine"]


def test_what_is_no_run_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="give the folder of a run"):
        evenkeel.Run(tmp_path / "none")


def test_importing_it_loads_nothing_heavy(tmp_path: Path) -> None:
    code = "import evenkeel, sys; print(*{name.split('.')[0] for name in sys.modules})"
    path = os.pathsep.join([str(ROOT), str(ROOT / "launch/library")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) & {"torch", "transformers", "megatron", "sglang", "matplotlib"} == set()
