"""Roles that all start at once, as on a cluster, in a finished run that gets more steps."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.data.event_log import read_metrics
from pipeline.data.run_directory import RunDirectory
from rollout_sglang.server.start import free_ports
from tests.support.engine_forks import forked_engines
from tests.support.runs import environment, evenkeel_json, make_model, make_recipe

pytestmark = [pytest.mark.loop, pytest.mark.slow, pytest.mark.timeout(600)]
AHEAD_S = 5.0
"""By which engine and collector start before the learner."""


def test_they_wait_for_the_recipe_that_the_learner_is_given(tmp_path: Path) -> None:
    """Without `--recipe` an engine would find the run finished and end, and nobody would start it again."""
    model = make_model(tmp_path / "model")

    def recipe_of(steps: int) -> Path:
        return make_recipe(
            tmp_path,
            model,
            f"steps-{steps}",
            run=dict(name="run", root=str(tmp_path / "runs"), steps=steps),
            learner=dict(optimizer=dict(decay_steps=4)),
            evaluation=dict(prompts=1, samples=1),
        )

    run = RunDirectory(tmp_path / "runs" / "run")
    with forked_engines():
        assert evenkeel_json("train", recipe_of(1))["steps"] == 1
    assert run.is_finished()
    longer = recipe_of(2)

    def start(*words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "launch.cli", "role", words[0], str(run.path), *words[1:]]
        with (tmp_path / f"{words[0]}.log").open("wb") as log:
            return subprocess.Popen(
                [*command, "--recipe", str(longer)], env=environment(), stdout=log, stderr=subprocess.STDOUT
            )

    roles = {"engine": start("engine", "0", "--port", str(*free_ports(1))), "collector": start("collector")}
    try:
        time.sleep(AHEAD_S)
        assert {name: role.poll() for name, role in roles.items()} == dict.fromkeys(roles)
        roles["learner"] = start("learner")
        for name, role in roles.items():
            assert role.wait(300) == 0, (tmp_path / f"{name}.log").read_text()
    finally:
        for role in roles.values():
            role.kill()
    assert [line["step"] for line in read_metrics(run.path)] == [0, 1]
    assert run.recipe().run.steps == 2
    assert evenkeel_json("verify", "history", run.path)["ok"]
