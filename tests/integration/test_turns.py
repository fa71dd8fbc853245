"""Learner and engine of a whole run take turns on the memory of one machine, and each is killed in the other's turn."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from pipeline.data.epochs import epoch_folder, newest
from pipeline.data.run_directory import RunDirectory
from rollout_sglang.protocol import ASLEEP
from tests.support.runs import environment, evenkeel_json, make_model, make_recipe

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(600)]
DEADLINE_S = 240.0
KEY = "0123456789abcdef"


def wait_until(found: Callable[[], bool], what: str, train: subprocess.Popen[str]) -> None:
    ends = time.monotonic() + DEADLINE_S
    while not found():
        assert train.poll() is None, f"the run ended before {what}"
        assert time.monotonic() < ends, what
        time.sleep(0.02)


def is_asleep(run: RunDirectory) -> bool:
    for member in run.membership().engines():
        try:
            answer = httpx.get(
                f"{member.url}/model_info", headers={"Authorization": f"Bearer {KEY}"}, timeout=2.0, trust_env=False
            )
            return bool(answer.json()["weight_version"] == ASLEEP)
        except (httpx.HTTPError, ValueError, KeyError):
            return False
    return False


def kill(train: subprocess.Popen[str], module: str) -> None:
    """Kill -9 of the processes of `train` that run a module."""
    for process in psutil.Process(train.pid).children(recursive=True):
        try:
            if module in process.cmdline():
                process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue


def test_a_run_goes_on_when_learner_or_engine_is_killed_while_the_engine_sleeps(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    recipe = make_recipe(
        tmp_path,
        tmp_path / "model",
        "turns",
        run=dict(steps=3, max_restarts=5),
        rollout=dict(colocated=True),
        weights=dict(channel="ipc"),
        checkpoint=dict(every=1),
    )
    run, log = RunDirectory(tmp_path / "runs" / "turns"), tmp_path / "train.log"
    with log.open("w") as output:
        train = subprocess.Popen(
            [sys.executable, "-m", "launch.cli", "train", str(recipe)],
            env=environment() | {"EVENKEEL_API_KEY": KEY},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            wait_until(lambda: is_asleep(run), "the engine slept", train)
            kill(train, "launch.run.learn_rank")
            wait_until(lambda: run.published_version() >= 1, "version 1 was published", train)
            wait_until(lambda: is_asleep(run), "the engine slept again", train)
            kill(train, "rollout_sglang.cpu.cpu_server")
            assert train.wait(DEADLINE_S) == 0, log.read_text()
        finally:
            train.terminate()
            train.wait(60)
    assert evenkeel_json("verify", "history", run.path)["ok"]
    assert run.published_version() == 3
    # The learner starts a third time where the engine died late, in its publish: then nobody took the version.
    assert newest(epoch_folder(run.path, "learner")) >= 2
    assert newest(epoch_folder(run.path, "engine", 0)) >= 2
    assert run.model_manifest.exists()
