"""A frozen engine (SIGSTOP) in a real run: nothing waits for it, it is left out, started again, or goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.data.event_log import read_events, read_metrics
from tests.support.processes import with_words
from tests.support.runs import ROOT, environment, evenkeel, make_model, make_recipe

pytestmark = [pytest.mark.loop, pytest.mark.slow, pytest.mark.timeout(900)]
CONTROL_CALL_S = 30.0
"""Longest wait for one call of a publish (rollout_sglang.client): what a frozen engine used to cost, several times."""


class Training:
    """`evenkeel train` as a process, and what its run directory says."""

    def __init__(self, process: psutil.Popen, run: Path) -> None:
        self.process, self.run = process, run

    def until(self, condition: Callable[[], Any], what: str, deadline_s: float = 400) -> Any:
        ends = time.monotonic() + deadline_s
        while not (found := condition()):
            assert self.process.poll() is None, self.process.stderr.read().decode()
            assert time.monotonic() < ends, f"waited {deadline_s:g} s for {what}"
            time.sleep(0.1)
        return found

    def steps(self) -> int:
        return len(read_metrics(self.run))

    def events(self, kind: Any, engine: int, since: float) -> list[dict[str, Any]]:
        return [e for e in read_events(self.run, kind) if e.get("engine") == engine and e["time"] > since]

    def restarts(self, engine: int, since: float) -> list[dict[str, Any]]:
        found = read_events(self.run, "restarted")
        return [e for e in found if e["process"] == f"engine-{engine}" and e["time"] > since]

    def engine(self, index: int, part: str) -> psutil.Process:
        """The HTTP process of an engine, or its scheduler."""
        role = with_words(self.process.children(), f" role engine {self.run} {index} ")[0]
        server = role.children()[0]
        return server if part == "http" else with_words(server.children(recursive=True), "scheduler")[0]


@contextmanager
def training(folder: Path, channel: str, engines: int, steps: int) -> Iterator[Training]:
    make_model(folder / "model")
    recipe = make_recipe(
        folder,
        folder / "model",
        "hung",
        run=dict(name="hung", steps=steps),
        rollout=dict(engines=engines, prompts_per_batch=4, group_size=4, max_new_tokens=12, context_tokens=64),
        weights=dict(channel=channel),
        checkpoint=dict(every=1),
    )
    command = [sys.executable, "-m", "launch.cli", "train", str(recipe), "--json"]
    process = psutil.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    try:
        yield Training(process, folder / "runs" / "hung")
    finally:
        if process.is_running():
            process.terminate()
        process.communicate(timeout=120)


@pytest.mark.parametrize(
    ("part", "channel"),
    [
        pytest.param("http", "disk", marks=pytest.mark.repeated),
        pytest.param("scheduler", "disk", marks=pytest.mark.repeated),
        pytest.param("scheduler", "broadcast", marks=pytest.mark.repeated),
        pytest.param("http", "ipc", marks=pytest.mark.repeated),
    ],
)
def test_a_run_does_not_notice_that_one_of_two_engines_is_frozen(tmp_path: Path, part: str, channel: str) -> None:
    with training(tmp_path, channel, 2, 400) as run:
        for engine in (0, 1):
            run.until(lambda engine=engine: run.events("admitted", engine, 0.0), f"engine {engine}")
        run.until(lambda: run.steps() >= 3, "three steps")
        victim, at = run.engine(1, part), time.time()
        victim.send_signal(signal.SIGSTOP)
        left_out = run.until(lambda: run.events("quarantined", 1, at), "quarantine")[0]
        assert "stopped" in left_out["reason"] or "answered nothing" in left_out["reason"]
        seen = run.steps()
        run.until(lambda: run.steps() >= seen + 2, "two steps beside it")
        again = run.until(lambda: run.restarts(1, at), "a restart of the engine")[0]
        assert "hangs" in again["reason"]
        run.until(lambda: run.events("admitted", 1, again["time"]), "the engine's second start to be admitted")
        slowest = max(event["seconds"] for event in read_events(run.run, "published") if event["time"] > at)
        print(f"{part} {channel}: quarantined after {left_out['time'] - at:.1f} s, restarted after "
              f"{again['time'] - at:.1f} s, slowest publish {slowest:.2f} s")  # fmt: skip
        assert slowest < CONTROL_CALL_S
    assert read_events(run.run, "restarted") == [again], "nothing else died"


def test_a_thawed_engine_is_verified_and_admitted(tmp_path: Path) -> None:
    with training(tmp_path, "disk", 2, 400) as run:
        for engine in (0, 1):
            run.until(lambda engine=engine: run.events("admitted", engine, 0.0), f"engine {engine}")
        victim, at = run.engine(0, "scheduler"), time.time()
        victim.send_signal(signal.SIGSTOP)
        left_out = run.until(lambda: run.events("quarantined", 0, at), "quarantine")[0]
        seen = run.steps()
        run.until(lambda: run.steps() >= seen + 1, "a publish that it misses")
        assert victim.is_running(), "it is ended only after STOPPED_GRACE_S, and a step takes a second"
        victim.send_signal(signal.SIGCONT)
        run.until(lambda: run.events("admitted", 0, left_out["time"]), "the engine to be admitted again")
        assert run.engine(0, "scheduler") == victim, "the same process serves, by its id and its start"
    assert read_events(run.run, "restarted") == []
    audit = json.loads(evenkeel("verify", "history", run.run, "--json").stdout.splitlines()[-1])
    assert (audit["lost"], audit["duplicated"], audit["version_violations"]) == (0, 0, 0)


@pytest.mark.parametrize("channel", ["disk", pytest.param("broadcast", marks=pytest.mark.repeated)])
def test_the_only_engine_may_freeze(tmp_path: Path, channel: str) -> None:
    """The run waits for it, and goes on with its next start."""
    with training(tmp_path, channel, 1, 400) as run:
        run.until(lambda: run.steps() >= 2, "two steps")
        victim, at = run.engine(0, "scheduler"), time.time()
        victim.send_signal(signal.SIGSTOP)
        again = run.until(lambda: run.restarts(0, at), "a restart of the engine")[0]
        seen = run.steps()
        run.until(lambda: run.steps() >= seen + 2, "two steps after it")
    restarted = {event["process"] for event in read_events(run.run, "restarted")}
    # A broadcast that was under way fails with its only engine, and the learner begins that publish anew.
    assert restarted - ({"learner"} if channel == "broadcast" else set()) == {"engine-0"}, again
