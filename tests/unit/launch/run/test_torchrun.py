"""The store of torchrun's ranks listens at the address that it is told, and nowhere else."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from launch.run.processes import child_environment, rendezvous_options, torchrun
from launch.run.torchrun import listen
from tests.support.listening import beyond_loopback, listening

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
