"""Programs and all below them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from launch.run import processes
from launch.run.processes import (
    ProcessTree,
    child_environment,
    rendezvous_options,
    saying_what_is_saved,
    torchrun,
    what_is_saved,
)
from launch.run.torchrun import listen
from pipeline.child_process import program_environment
from pipeline.data.run_directory import RunDirectory
from tests.support.listening import beyond_loopback, listening

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


def run_with(folder: Path, batches: int, checkpoints: tuple[int, ...]) -> RunDirectory:
    run = RunDirectory(folder)
    run.make_folders()
    for index in range(batches):
        (run.batches / f"{index:06d}.zarr.zip").touch()
    for step in checkpoints:
        (run.checkpoints / f"{step:06d}").mkdir()
        (run.checkpoints / f"{step:06d}/COMMIT").touch()
    return run


@pytest.mark.parametrize(
    ("batches", "checkpoints", "said"),
    [
        (0, (), "holds no checkpoint yet; the same command begins again"),
        (1, (), "holds 1 batch and no checkpoint yet; the same command goes on from there"),
        (12, (5, 10), "holds 12 batches and the checkpoint of step 10 of 20; the same command goes on from there"),
    ],
)
def test_what_is_saved(tmp_path: Path, batches: int, checkpoints: tuple[int, ...], said: str) -> None:
    assert what_is_saved(run_with(tmp_path, batches, checkpoints), 20) == f"{tmp_path} {said}"


def test_an_end_at_once_carries_it(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt, match="the checkpoint of step 3 of 8"),
        saying_what_is_saved(run_with(tmp_path, 4, (3,)), 8),
    ):
        raise KeyboardInterrupt


PROGRAM = """\
import pathlib, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
folder = pathlib.Path(sys.argv[1])
(folder / f"rank-{dist.get_rank()}-of-{dist.get_world_size()}").touch()
while not (folder / "end").exists():
    time.sleep(0.05)
dist.barrier()
"""


@pytest.mark.slow
def test_ranks_of_two_agents_meet_at_one_address(tmp_path: Path) -> None:
    """Two agents of a rank each, as on two hosts. Nothing of them listens beyond loopback."""
    (tmp_path / "met.py").write_text(PROGRAM)
    environment = child_environment() | {"GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] += f":{tmp_path}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    logs = [os.open(tmp_path / f"{node}.log", os.O_WRONLY | os.O_CREAT) for node in (0, 1)]
    agents = [
        psutil.Popen(
            torchrun(1, "met", str(tmp_path), options=rendezvous_options(node, "localhost", port, "127.0.0.1", 2)),
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        for node, log in enumerate(logs)
    ]
    try:
        ends = time.monotonic() + 200
        while {path.name for path in tmp_path.glob("rank-*")} != {"rank-0-of-2", "rank-1-of-2"}:
            assert time.monotonic() < ends, [path.read_text() for path in tmp_path.glob("*.log")]
            time.sleep(0.1)
        assert ("127.0.0.1", port) in listening(agents)
        assert beyond_loopback(agents) == set()
        (tmp_path / "end").touch()
        assert [agent.wait(60) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            for process in [*agent.children(recursive=True), agent] if agent.is_running() else []:
                process.kill()
            agent.wait(20)
        for log in logs:
            os.close(log)


def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(OSError, match="Address already in use"):
            listen("127.0.0.1", holder.getsockname()[1], 1, timedelta(seconds=1))
