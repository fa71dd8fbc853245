"""`import evenkeel`: recipes, training, runs, batches and metrics from a program."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

import evenkeel
from launch import cli
from launch import cli as command_line
from launch.convert.new_model import new_model as make
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import RecipeError, StoreError
from pipeline.rewards.calling import resolve
from pipeline.tasks.tokenizer import Tokenizer, write_character_tokenizer
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


def python_of_the_page() -> list[str]:
    return re.findall("```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(encoding="utf-8"), re.DOTALL)


def test_the_page_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks, but for the minutes of training, and for the text of samples, which takes a tokenizer."""
    monkeypatch.chdir(tmp_path)
    ran: list[tuple[Any, ...]] = []

    def run_sft(recipe: evenkeel.Recipe, out: Path, **options: Any) -> None:
        write_run(tmp_path / "runs", 2, name=f"{recipe.run.name}-sft")
        ran.append((str(recipe.model.path), str(out), options))

    def train_run(recipe: evenkeel.Recipe, metrics_port: int | None) -> None:
        write_run(tmp_path / "runs", 3, name=recipe.run.name)
        ran.append((str(recipe.model.path), recipe.run.steps, metrics_port))

    monkeypatch.setattr("launch.run.sft.run_sft", run_sft)
    monkeypatch.setattr("launch.run.train.train_run", train_run)
    training, own, reading = python_of_the_page()
    names: dict[str, Any] = {}
    exec(training, names)
    assert (tmp_path / "runs/models/mine/model.safetensors").is_file()
    options = dict(steps=300, batch_size=128, lr=None, warmup_steps=None, data=None, held_out=None)
    assert ran == [
        ("runs/models/mine", "runs/models/mine-sft", options),
        ("runs/models/mine-sft", 20, None),
    ]
    assert names["run"].metrics["step"].tolist() == [0, 1, 2]

    program = f"import evenkeel\n\n{own}print(*(f'{{one.task.reward}}|{{one.run.name}}' for one in (recipe, again)))\n"
    (tmp_path / "own.py").write_text(program, encoding="utf-8")
    path = os.pathsep.join([str(ROOT), str(ROOT / "launch/library")])
    done = subprocess.run(
        [sys.executable, "own.py"], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert re.fullmatch(r"(evenkeel_score_[0-9a-f]{8}:score)\|own \1\|second\n", done.stdout), done.stderr

    written = write_run(tmp_path / "runs", 1, name="demo")
    batch = batch_of_rewards([[0.0, 1.0], [1.0, 1.0]])
    BatchStore(RunDirectory(written).batches).commit(batch)
    RunDirectory(written).write_logprobs(0, batch.rollout_logprobs - 0.5)
    monkeypatch.setattr(evenkeel.Run, "samples", lambda run, index: [])
    exec(reading, names)
    np.testing.assert_allclose(names["gap"], -0.5, rtol=1e-6)


def test_python_takes_what_the_command_line_takes() -> None:
    def defaults(function: Any) -> dict[str, Any]:
        parameters = inspect.signature(function).parameters.values()
        return {p.name: p.default for p in parameters if p.name not in ("changes", "overrides", "as_json")}

    assert defaults(evenkeel.sft) == defaults(cli.sft)
    taken = inspect.signature(make).parameters.keys() | {"config"}
    assert inspect.signature(command_line.model_new).parameters.keys() - {"context", "directory"} <= taken


RECIPE: dict[str, Any] = dict(run=dict(name="own", steps=2), model=dict(path="m"), task=dict(name="sort_digits"))


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        (RECIPE, {"run.seed": np.int64(3), "learner.optimizer.lr": np.float32(0.5)}),
        (RECIPE, ["run.seed=3", "learner.optimizer.lr=0.5"]),
        ({**RECIPE, "run.seed": 3, "learner.optimizer": {"lr": 0.5}}, ()),
        ({"extends": "demo", "run": {"name": "own", "steps": 2, "seed": 3}, "learner.optimizer.lr": 0.5}, ()),
        ("demo", {"run": {"name": "own", "steps": 2, "seed": 3}, "learner.optimizer.lr": 0.5}),
    ],
)
def test_a_recipe_is_a_name_a_mapping_or_a_recipe(recipe: Any, changes: Any) -> None:
    for loaded in (evenkeel.load_recipe(recipe, changes), evenkeel.load_recipe(evenkeel.load_recipe(recipe, changes))):
        assert (loaded.run.name, loaded.run.steps, loaded.run.seed) == ("own", 2, 3)
        assert loaded.learner.optimizer.lr == 0.5
    assert RECIPE["run"] == dict(name="own", steps=2)


CIRCLE: dict[str, Any] = {}
CIRCLE["run"] = CIRCLE


def test_a_function_of_a_program_brings_along_what_it_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "program.py").write_text(
        "import math as maths, re\nfrom functools import lru_cache\nimport evenkeel\n"
        "LAST = re.compile('(X?)(.)$', re.I)\nWORTH = {'a': 0.5}\n"
        "@lru_cache\ndef last(text):\n    return LAST.search(text)[2] if text else last('a')\n"
        "def score(response, worth=WORTH, unused: 'Nowhere' = None):\n"
        "    return max(maths.floor(2.5) * worth[last(c)] for c in [response])\n"
        "OPEN = open(__file__)\n"
        "def bad(response):\n    return OPEN\n"
        "def task(reward): return {'task': {'name': 'data', 'path': 'x', 'reward': reward}}\n"
        "print(evenkeel.load_recipe('demo', task(score)).task.reward)\n"
        "try:\n    evenkeel.load_recipe('demo', task(bad))\n"
        "except evenkeel.EvenKeelError as error:\n    print(error)\n",
        encoding="utf-8",
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "launch/library")])
    command = [sys.executable, str(tmp_path / "program.py")]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    name, refused = done.stdout.splitlines()
    assert refused.startswith("the function uses OPEN, a TextIOWrapper, which no file can say"), done.stderr
    monkeypatch.syspath_prepend(tmp_path)
    assert [resolve(name)(response) for response in ("xa", "")] == [1.0, 1.0]


def test_training_goes_on_beside_the_event_loop_of_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def something() -> Path:
        await asyncio.sleep(0)
        return write_run(tmp_path, 3, name="own")

    monkeypatch.setattr("launch.run.train.train_run", lambda recipe, port: asyncio.run(something()))
    recipe = evenkeel.load_recipe(RECIPE, {"run.root": tmp_path})

    async def cell() -> list[int]:
        steps = evenkeel.train(recipe).metrics["step"].tolist()
        await asyncio.sleep(0)
        assert asyncio.get_running_loop() is asyncio.get_event_loop()
        return steps

    assert asyncio.run(cell()) == [0, 1, 2]
    with ThreadPoolExecutor(1) as pool, pytest.raises(RecipeError, match="call it in the main"):
        pool.submit(evenkeel.train, recipe).result()


def test_runs_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, 3, name="mine")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "recipe.yaml").write_text("no: recipe\n", encoding="utf-8")
    assert [run.path.name for run in evenkeel.list_runs(tmp_path)] == ["mine"]


def test_importing_it_loads_nothing_heavy(tmp_path: Path) -> None:
    code = "import evenkeel, sys; print(*{name.split('.')[0] for name in sys.modules})"
    path = os.pathsep.join([str(ROOT), str(ROOT / "launch/library")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) & {"torch", "transformers", "megatron", "sglang", "matplotlib"} == set()
