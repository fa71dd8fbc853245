"""kill -9 of every kind of process in the middle of one run: it recovers, and the batches hold each group once."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pipeline.data.event_log import read_events, read_metrics
from tests.support.runs import ROOT, environment, evenkeel_json, make_model, make_recipe

pytestmark = [pytest.mark.loop, pytest.mark.timeout(600)]
STEPS = 11
EVERYDAY = ((2, ["launch.run.learn_rank"], "learner"), (4, ["rollout_sglang", "--weight-version"], "engine-"))
"""After so many steps, a process with these words in its command line is killed; restarts are counted by this name."""
EVERY_PROCESS = (
    (2, ["launch.run.learn_rank"], "learner"),
    (4, ["role collector"], "collector"),
    (5, ["rollout_sglang", "--weight-version"], "engine-"),
    (6, ["role router"], "router"),
    (7, ["role learner"], "learner"),
    (8, ["role engine"], "engine-"),
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_model(tmp_path / "model")
    make_recipe(
        tmp_path,
        tmp_path / "model",
        "chaos",
        run=dict(name="chaos", steps=STEPS),
        rollout=dict(engines=2, prompts_per_batch=4, group_size=4, max_new_tokens=12, context_tokens=64),
        learner=dict(tensor_parallel=2, micro_batch_tokens=256, optimizer=dict(lr=1e-3, warmup_steps=0)),
    )
    return tmp_path / "runs" / "chaos"


@pytest.fixture
def supervisor(run: Path) -> Iterator[psutil.Popen]:
    command = [sys.executable, "-m", "launch.cli", "train", str(run.parents[1] / "chaos.yaml"), "--json"]
    process = psutil.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    yield process
    if process.is_running():
        process.terminate()
    process.communicate(timeout=60)


def wait_for(condition: Callable[[], object], what: str, deadline_s: float = 200) -> None:
    give_up = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < give_up, f"waited {deadline_s} s for {what}"
        time.sleep(0.1)


def children(supervisor: psutil.Process, *words: str) -> list[psutil.Process]:
    """Descendants whose command line holds all `words`, and not torchrun's agent."""
    found = []
    for child in supervisor.children(recursive=True):
        try:
            line = " ".join(child.cmdline())
        except psutil.Error:
            continue
        if all(word in line for word in words) and "torch.distributed.run" not in line:
            found.append(child)
    return found


def restarts(run: Path, process: str) -> int:
    """How often processes were started again whose names begin so."""
    return sum(event["process"].startswith(process) for event in read_events(run, "restarted"))


@pytest.mark.parametrize(
    "kills", [pytest.param(EVERYDAY, id="two"), pytest.param(EVERY_PROCESS, id="every", marks=pytest.mark.slow)]
)
def test_processes_may_die(run: Path, supervisor: psutil.Popen, kills: tuple[tuple[int, list[str], str], ...]) -> None:
    for steps, words, name in kills:
        wait_for(lambda steps=steps: len(read_metrics(run)) >= steps, f"step {steps}")
        victims = children(supervisor, *words)
        assert victims, f"no process to kill: {words}"
        before = restarts(run, name)
        victims[0].kill()
        wait_for(lambda name=name, before=before: restarts(run, name) > before, f"a restart of {name}")
        if name == "collector":  # once more, while it starts
            wait_for(lambda: children(supervisor, "role collector"), "the collector's second start")
            children(supervisor, "role collector")[0].kill()
            wait_for(lambda: restarts(run, "collector") >= 2, "a second restart of the collector")
    wait_for(lambda: len(read_metrics(run)) >= STEPS - 2, "the last steps")
    orphans = supervisor.children(recursive=True)
    supervisor.kill()
    _, alive = psutil.wait_procs(orphans, timeout=30)
    assert alive == [], "children outlived their supervisor"

    result = evenkeel_json("train", run.parents[1] / "chaos.yaml")
    assert result["steps"] == STEPS
    audit = evenkeel_json("verify", "history", run)
    assert (audit["lost"], audit["duplicated"], audit["version_violations"]) == (0, 0, 0)
    assert audit["batches"] == STEPS
    assert audit["groups"] == STEPS * 4
    assert [line["step"] for line in read_metrics(run)] == list(range(STEPS))
    replayed = evenkeel_json("train", "--replay", run)
    assert replayed["bit_identical"], f"recovery changed the weights: {json.dumps(replayed)}"
