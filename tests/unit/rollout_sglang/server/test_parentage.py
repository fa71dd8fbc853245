"""A scheduler that is spawned or forked ends with its server, also when that died before the scheduler could ask."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rollout_sglang.server.parentage import PARENT_VARIABLE

SERVER = """\
import multiprocessing, os, pathlib, sys, time
from rollout_sglang.server.parentage import be_a_parent, be_a_spawned_child

def child(folder):
    (pathlib.Path(folder) / "child").write_text(str(os.getpid()))
    time.sleep(600)

if __name__ == "__mp_main__":
    be_a_spawned_child()

if __name__ == "__main__":
    be_a_parent()
    multiprocessing.get_context(sys.argv[1]).Process(target=child, args=(sys.argv[2],)).start()
    time.sleep(600)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_end_with_the_server(tmp_path: Path, method: str) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "server.py"), method, str(tmp_path)], env=environment
    ) as server:
        try:
            ends = time.monotonic() + 60
            while not ((tmp_path / "child").exists() and (tmp_path / "child").read_text()):
                assert time.monotonic() < ends
                time.sleep(0.02)
            child = psutil.Process(int((tmp_path / "child").read_text()))
        finally:
            server.kill()
    assert psutil.wait_procs([child], timeout=60)[1] == []


def test_a_spawned_child_whose_server_is_gone_ends() -> None:
    code = "from rollout_sglang.server.parentage import be_a_spawned_child; be_a_spawned_child(); print('alive')"
    for parent, output in ((os.getpid(), "alive\n"), (1, "")):
        environment = {**os.environ, PARENT_VARIABLE: str(parent)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
        assert done.stdout == output
