"""The faults of the kill matrix, in small processes of their own: each strikes at its point, once, and nowhere else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.kills import hooks
from tests.chaos.kills.driver import INJECT, ROOT
from tests.chaos.kills.plan import Fault

COMMIT = """
import os, sys
run = sys.argv[1]
with open(f"{run}/batches/.000001.zarr.zip.tmp", "wb") as file:
    for part in range(8):
        file.write(b"x" * 100)
os.rename(f"{run}/batches/.000001.zarr.zip.tmp", f"{run}/batches/000001.zarr.zip")
log = os.open(f"{run}/events/collector-000001.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(log, b'{"kind": "committed", "batch": 1}\\n')
print("done")
"""
"""What a collector does when it commits: a file, its name, its event."""


@pytest.fixture
def case(tmp_path: Path) -> Path:
    for name in ("fired", "pids", "runs/run/batches", "runs/run/events", "runs/run/metrics"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


def arm(case: Path, point: str, *victims: str, **settings: Any) -> None:
    fault = Fault("one", point, victims or ("self",), **settings)
    (case / "armed.json").write_text(json.dumps([fault.order()]))


def run(case: Path, code: str = COMMIT, *, role: str = "collector") -> subprocess.Popen[str]:
    """The code as a process that the hooks take for a role of the run."""
    environment = {**os.environ, hooks.VARIABLE: str(case), "PYTHONPATH": f"{INJECT}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", code, str(case / "runs" / "run"), "role", role]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def names(case: Path) -> list[str]:
    return sorted(path.name for path in (case / "runs" / "run" / "batches").iterdir())


def test_without_a_fault_nothing_happens(case: Path) -> None:
    process = run(case)
    assert process.communicate(timeout=60) == ("done\n", "")
    assert (case / "runs/run/batches/000001.zarr.zip").stat().st_size == 800
    assert not list((case / "fired").iterdir())
    pid, _ = (case / "pids" / "collector").read_text().split()
    assert int(pid) == process.pid


def test_half_a_file(case: Path) -> None:
    arm(case, "half:batch")
    process = run(case)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert names(case) == [".000001.zarr.zip.tmp"]
    assert (case / "runs/run/batches/.000001.zarr.zip.tmp").stat().st_size % 100 == 50
    again = run(case)
    assert again.communicate(timeout=60)[0] == "done\n", "a fault strikes once"


def test_before_a_file_gets_its_name(case: Path) -> None:
    arm(case, "name:batch")
    process = run(case)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert names(case) == [".000001.zarr.zip.tmp"]
    assert (case / "runs/run/batches/.000001.zarr.zip.tmp").stat().st_size == 800


@pytest.mark.parametrize(("point", "size"), [("before:committed", 0), ("half:event", 17), ("after:committed", 34)])
def test_around_an_event(case: Path, point: str, size: int) -> None:
    arm(case, point)
    process = run(case)
    assert process.communicate(timeout=60)[0] == ""
    assert process.returncode == -signal.SIGKILL
    assert (case / "runs/run/events/collector-000001.jsonl").stat().st_size == size


def test_another_process_is_struck_at_the_line(case: Path) -> None:
    sleeper = run(case, "import time; time.sleep(60)", role="router")
    while not hooks_find(case, "router"):
        time.sleep(0.02)
    arm(case, "after:committed", "router", "self")
    process = run(case)
    process.communicate(timeout=60)
    assert (sleeper.wait(10), process.returncode) == (-signal.SIGKILL, -signal.SIGKILL)
    assert json.loads((case / "fired" / "one").read_text())["pids"] == [[sleeper.pid], [process.pid]]
    sleeper.communicate()


def test_a_victim_that_is_not_there_leaves_the_fault_armed(case: Path) -> None:
    arm(case, "after:committed", "router")
    assert run(case).communicate(timeout=60)[0] == "done\n"
    assert not list((case / "fired").iterdir())


def test_a_full_disk_is_an_error_after_half_a_file(case: Path) -> None:
    arm(case, "half:batch", action="full")
    said = run(case).communicate(timeout=60)[1]
    assert "No space left on device" in said
    assert (case / "runs/run/batches/.000001.zarr.zip.tmp").stat().st_size % 100 == 50


def test_the_learner_waits_for_its_pace(case: Path) -> None:
    (case / "pace").write_text("1")
    code = """
import os, sys
log = os.open(f"{sys.argv[1]}/metrics/learner-000001.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for step in range(2):
    os.write(log, b'{"step": %d}\\n' % step)
"""
    process = run(case, code, role="learner")
    log = case / "runs/run/metrics/learner-000001.jsonl"
    while not (log.exists() and log.stat().st_size):
        time.sleep(0.02)
    time.sleep(0.3)
    assert log.read_text() == '{"step": 0}\n'
    (case / "pace").write_text("2")
    process.communicate(timeout=60)
    assert log.read_text() == '{"step": 0}\n{"step": 1}\n'


def test_a_clock_is_wrong_for_those_that_are_named(case: Path) -> None:
    (case / "clock").write_text('{"collector": -3600}')
    code = "import time; print(time.time())"
    for role, error_s in (("collector", -3600), ("router", 0)):
        assert float(run(case, code, role=role).communicate(timeout=60)[0]) == pytest.approx(
            time.time() + error_s, abs=60
        )


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("python -P -m launch.cli role collector /runs/a", "collector"),
        ("python -P -m launch.cli role engine /runs/a 1 --port 5", "engine-role-1"),
        ("python -m launch.run.learn_rank /runs/a", "rank-1"),
        ("python -m launch.run.learn_rank /runs/a --replay /runs/b", None),
        ("python -P -m rollout_sglang.cpu.cpu_server --model-path /runs/a", "engine-0"),
        ("python -m launch.cli train recipe.yaml --json", "supervisor"),
        ("python -m launch.cli train --replay /runs/a", None),
        ("python -c import this", None),
    ],
)
def test_processes_are_known_by_their_command_lines(line: str, name: str | None) -> None:
    environment = {"RANK": "1", "EVENKEEL_LOG": "/runs/a/logs/engine-0-000003.log"}
    assert hooks.name_of(line.split(), environment) == name


def hooks_find(case: Path, name: str) -> list[int]:
    hooks.look_in(str(case))
    return hooks.find(name)
