"""Programs and all below them."""

from __future__ import annotations

import sys
import time

import psutil
import pytest

from launch.run import processes
from launch.run.processes import ProcessTree
from pipeline.child_process import program_environment

PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"


@pytest.fixture
def killed_trees(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    end_tree = processes.end_tree
    monkeypatch.setattr(processes, "end_tree", lambda pid: (found.append(pid), end_tree(pid)))
    return found


def test_a_program_is_killed_with_all_below_it(killed_trees: list[int]) -> None:
    program = ProcessTree([sys.executable, "-c", PARENT], None, program_environment())
    deadline = time.monotonic() + 30.0
    while not (below := psutil.Process(program.pid).children(recursive=True)) and time.monotonic() < deadline:
        time.sleep(0.02)
    program.kill()
    assert killed_trees == [program.pid]
    assert below
    assert not any(process.is_running() for process in below)


def test_the_number_of_one_that_has_ended_is_not_killed(killed_trees: list[int]) -> None:
    """Another process may have it by then."""
    program = ProcessTree([sys.executable, "-c", ""], None, program_environment())
    deadline = time.monotonic() + 30.0
    while program.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    program.kill()
    assert killed_trees == []
