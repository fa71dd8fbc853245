"""Ctrl-C, as a terminal sends it: to every process of the command. It says what is saved and how to go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.data.event_log import read_metrics
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from tests.support.runs import ROOT, environment, make_model, make_recipe

START_DEADLINE_S = 120.0
END_DEADLINE_S = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.loop]


@contextmanager
def started(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """`evenkeel …` in a process group of its own, which is ended with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "launch.cli", *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environment(),
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until(done: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + START_DEADLINE_S
    while not done():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.05)


def test_of_a_run(tmp_path: Path) -> None:
    recipe = make_recipe(
        tmp_path,
        make_model(tmp_path / "model", layers=1),
        "run",
        run=dict(name="run", root=str(tmp_path / "runs"), steps=400),
        evaluation=dict(every=1000, prompts=1, samples=1),
        checkpoint=dict(every=1000),
    )
    run = RunDirectory(tmp_path / "runs/run")
    with started("train", recipe) as process:
        wait_until(lambda: bool(read_metrics(run.path)), process)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=END_DEADLINE_S)
    assert process.returncode == 0, said
    assert "asked to end: the learner saves at its next step" in said
    (step,) = run.saved_steps()
    batches = BatchStore(run.batches).next_index
    assert 0 < step <= batches < 400
    found = f"{batches} batch{'' if batches == 1 else 'es'} and the checkpoint of step {step} of 400"
    assert said.splitlines()[-1] == f"stopped; {run.path} holds {found}; the same command goes on from there"
