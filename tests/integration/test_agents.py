"""Whole runs of episodes: real engines, a real learner, environments and agents in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from launch.convert.new_model import new_model
from pipeline.data.batch import Batch, TokenKind
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from tests.support.runs import environment, evenkeel_json, make_recipe, trained

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
CHARACTERS = "0123456789=#>:<!digts"
ECHO = dict(environment="tests.support.environments:Echo", tools=["calculator"])
DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    new_model(folder, characters=CHARACTERS)
    return folder


def batches(run: Path) -> list[Batch]:
    store = BatchStore(run / "batches")
    return [store.read(index, None) for index in sorted(store.settled())]


def test_an_environment_and_tools_are_trained_and_replayed_to_the_bit(tmp_path: Path, model: Path) -> None:
    sections: dict[str, Any] = dict(run=dict(steps=3), episode=ECHO, rollout=dict(context_tokens=128))
    run = trained(tmp_path, model, "echo", **sections)
    for batch in batches(run):
        assert batch.episodes is not None
        assert batch.num_episodes == 16
        assert batch.episodes.turns.sum() > 2 * 16
    assert evenkeel_json("train", "--replay", run)["bit_identical"]


@pytest.mark.slow
def test_an_episode_that_branches_is_two_rows_of_one_reward(tmp_path: Path, model: Path) -> None:
    sections: dict[str, Any] = dict(
        run=dict(steps=2),
        episode=dict(agent="tests.support.environments:asking_twice"),
        rollout=dict(context_tokens=128),
    )
    run = trained(tmp_path, model, "twice", **sections)
    for batch in batches(run):
        assert batch.episodes is not None
        assert (batch.num_episodes, batch.num_samples) == (16, 32)
        np.testing.assert_array_equal(batch.episodes.turns.reshape(16, 2).sum(1), 3)
        np.testing.assert_array_equal(batch.reward[::2], batch.reward[1::2])
        assert batch.token_kind is not None
        np.testing.assert_array_equal(batch.loss_mask, batch.token_kind == TokenKind.SAMPLED)


@pytest.mark.slow
def test_a_stuck_environment_costs_its_group_and_no_kill_loses_or_doubles_one(tmp_path: Path, model: Path) -> None:
    """The host of environments, the engine and the collector are killed, one after another."""
    recipe = make_recipe(
        tmp_path,
        model,
        "killed",
        run=dict(steps=6, max_restarts=8),
        schedule=dict(kind="async", lag=1),
        episode=dict(**ECHO, options=dict(stuck=True), step_s=3.0),
        rollout=dict(context_tokens=128, prompts_per_batch=8, group_size=4),
    )
    run, log = RunDirectory(tmp_path / "runs" / "killed"), tmp_path / "train.log"
    with log.open("w", encoding="utf-8") as output:
        train = subprocess.Popen(
            [sys.executable, "-m", "launch.cli", "train", str(recipe)],
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            for version, words in enumerate((("episodes.host",), ("cpu_server",), ("collector",)), start=1):
                _wait(lambda version=version: newest_version(run) >= version, train)
                _kill(train, words)
            assert train.wait(DEADLINE_S) == 0, log.read_text(encoding="utf-8")
        finally:
            train.terminate()
            train.wait(60)
    history = evenkeel_json("verify", "history", run.path)
    assert history["ok"]
    dropped = [drop for batch in batches(run.path) for drop in batch.dropped]
    assert {drop.kind for drop in dropped} == {"failed"}
    assert run.published_version() == 6
    assert evenkeel_json("train", "--replay", run.path)["bit_identical"]


def newest_version(run: RunDirectory) -> int:
    return max((int(file.name) for file in run.published.glob("[0-9]*")), default=-1)


def _wait(reached: Any, train: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + DEADLINE_S
    while not reached():
        assert train.poll() is None
        assert time.monotonic() < ends
        time.sleep(0.02)


def _kill(train: subprocess.Popen[bytes], words: tuple[str, ...]) -> None:
    """Kill -9 of the processes of `train` whose command holds one of the words; there is at least one."""
    killed = 0
    for process in psutil.Process(train.pid).children(recursive=True):
        try:
            if any(word in " ".join(process.cmdline()) for word in words):
                process.send_signal(signal.SIGKILL)
                killed += 1
        except psutil.NoSuchProcess:
            continue
    assert killed, words
