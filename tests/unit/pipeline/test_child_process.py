"""No child outlives its parent, and its output lies where only this user can read it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from pipeline.child_process import PARENT_VARIABLE, ChildProcess
from tests.support.processes import unkillable

SLEEPS = "import time; print('up', flush=True); time.sleep(60)"
DEADLINE_S = 20.0


def python(code: str, log: Path) -> ChildProcess:
    return ChildProcess([sys.executable, "-c", code], log, os.environ)


def wait_for(text: str, log: Path) -> None:
    ends = time.monotonic() + DEADLINE_S
    while text not in (log.read_text(encoding="utf-8") if log.exists() else ""):
        assert time.monotonic() < ends, f"{log} never said {text}"
        time.sleep(0.02)


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_child_appends_to_a_private_log_and_has_its_own_exit_status(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "child.log"
    for _ in range(2):
        child = python("import sys; print('said', sys.argv); sys.exit(7)", log)
        child._process.wait(DEADLINE_S)
        assert child.poll() == 7
    assert log.read_text() == "said ['-c']\n" * 2
    assert log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("prepare", "status"),
    [("", -signal.SIGTERM), ("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);", -signal.SIGKILL)],
)
def test_a_child_is_stopped_whether_it_listens_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: str, status: int
) -> None:
    monkeypatch.setattr(ChildProcess, "grace_s", 0.3)
    child = python(prepare + SLEEPS, tmp_path / "log")
    wait_for("up", tmp_path / "log")
    child.stop()
    assert child.poll() == status


def test_nobody_waits_for_ever_for_a_child_that_cannot_be_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child = python(SLEEPS, tmp_path / "log")
    with unkillable(child._process):
        child.stop()
        assert child.poll() is None
    said = capsys.readouterr().err
    assert said.startswith(f"warning: process {child.pid} was killed and has not ended in 30 s: ")
    assert said.count("\n") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux is asked")
@pytest.mark.parametrize("kind", ["pipeline.child_process.ChildProcess", "rollout_sglang.server.process.ServerProcess"])
def test_no_child_outlives_a_parent_that_is_killed(tmp_path: Path, kind: str) -> None:
    module, _, name = kind.rpartition(".")
    further = "" if name == "ChildProcess" else "ready_url='http://127.0.0.1:1/', secret=None,"
    parent_code = (
        f"import os, sys, time; from pathlib import Path; from {module} import {name};"
        f"child = {name}([sys.executable, '-c', {SLEEPS!r}], log=Path({str(tmp_path / 'log')!r}), {further}"
        "environment=os.environ); print(child.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        wait_for("up", tmp_path / "log")
        parent.kill()
    ends = time.monotonic() + DEADLINE_S
    while not has_ended(child) and time.monotonic() < ends:
        time.sleep(0.02)
    assert has_ended(child)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc of Linux is read")
def test_a_child_ignores_no_signals_because_python_does(tmp_path: Path) -> None:
    child = ChildProcess(["sleep", "60"], tmp_path / "log", os.environ)
    try:
        status = Path(f"/proc/{child.pid}/status")
        ends = time.monotonic() + DEADLINE_S
        while "Name:\tsleep" not in status.read_text(encoding="utf-8"):
            assert time.monotonic() < ends, status.read_text(encoding="utf-8")
            time.sleep(0.02)
        ignored = int(status.read_text(encoding="utf-8").partition("SigIgn:")[2].split()[0], 16)
        assert [number for number in (signal.SIGPIPE, signal.SIGXFSZ) if ignored >> (number - 1) & 1] == []
    finally:
        child.kill()


def test_a_parent_with_busy_threads_can_start_children(tmp_path: Path) -> None:
    done = threading.Event()
    threads = [threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(done.is_set, True)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for index in range(5):
            child = python("", tmp_path / f"{index}.log")
            child._process.wait(DEADLINE_S)
            assert child.poll() == 0
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_a_child_whose_parent_died_before_it_asked_ends(tmp_path: Path) -> None:
    """Its parent is another process by then, which the variable does not name."""
    code = "from pipeline.child_process import die_with_parent; die_with_parent(); print('alive')"
    for parent, ends_well in ((os.getpid(), True), (1, False)):
        environment = {**os.environ, PARENT_VARIABLE: str(parent)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
        assert (done.returncode == 0, done.stdout == "alive\n") == (ends_well, ends_well), done
