"""No child outlives its parent, and its output lies where only this user can read it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from pipeline import child_process
from pipeline.child_process import (
    PARENT_VARIABLE,
    ChildProcess,
    first_error,
    log_tail,
    make_scratch,
    remove_scratch,
)
from pipeline.errors import MachineError
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
@pytest.mark.parametrize("kind", ["pipeline.child_process.ChildProcess", "rollout_sglang.server.start.ServerProcess"])
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


def test_a_child_whose_parent_died_before_it_asked_ends(tmp_path: Path) -> None:
    """Its parent is another process by then, which the variable does not name."""
    code = "from pipeline.child_process import die_with_parent; die_with_parent(); print('alive')"
    for parent, ends_well in ((os.getpid(), True), (1, False)):
        environment = {**os.environ, PARENT_VARIABLE: str(parent)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
        assert (done.returncode == 0, done.stdout == "alive\n") == (ends_well, ends_well), done


TORCHRUN = """\
[rank1]:   File "model.py", line 3, in forward
[rank1]: ValueError: weights are not finite
E1121 05:54:32 api.py:1002] failed (exitcode: 1) local_rank: 0
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
  exitcode  : 1 (pid: 27060)
"""

RANK_KILLED = """\
[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:4711
W1122 18:00:22 api.py:1002] Sending process 24458 closing signal SIGTERM
[1]:
  rank      : 0 (local_rank: 0)
  traceback : Signal 15 (SIGTERM) received by PID 24458
-------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 24459)  (SIGKILL)
  traceback : Signal 9 (SIGKILL) received by PID 24459
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (RANK_KILLED, "rank 1 was killed by signal 9 (SIGKILL)"),
        (TORCHRUN, "[rank1]: ValueError: weights are not finite"),
        ("loading\nerror: the model folder is gone\nbye\n", "error: the model folder is gone"),
        ("KeyError: 'a'\nduring that, another:\nmegatron.core.CheckpointingException: no such key\n",
         "megatron.core.CheckpointingException: no such key"),
        ("[rank0]: KeyboardInterrupt\nbye\n", "[rank0]: KeyboardInterrupt"),
        ("usage: role [--help]\nrole: error: unrecognized: --x\n", "role: error: unrecognized: --x"),
        ("one\n\ntwo\nkilled\n", "one | two | killed"),
        ("", ""),
    ],
)  # fmt: skip
def test_the_reason_is_found_among_the_noise(tmp_path: Path, text: str, told: str) -> None:
    log = tmp_path / "learner.log"
    log.write_text(text)
    assert log_tail(log) == told


SGLANG = """\
[2026-11-22 17:00:01] server_args=ServerArgs(model_path='/m', log_level='error')
[2026-11-22 17:00:02] Ignore import error when loading sglang.srt.models.x: No module named 'y'
INFO:     Waiting for application startup.
ERROR:    [Errno 98] bind on ('127.0.0.1', 30000): address already in use
[2026-11-22 17:00:12] post-warmup freeze_gc failed
Traceback (most recent call last):
requests.exceptions.ReadTimeout: HTTPConnectionPool(host='127.0.0.1', port=30000): Read timed out. (read timeout=10)
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            SGLANG,
            "ERROR:    [Errno 98] bind on ('127.0.0.1', 30000): address already in use",
        ),
        (
            "[2026-11-22 TP0] hit an exception: Traceback\nValueError: head\nSystemExit: 1\n",
            "ValueError: head",
        ),
        (
            "launch_server.py: error: unrecognized: --x",
            "launch_server.py: error: unrecognized: --x",
        ),
        (
            "AttributeError: module 'sglang.srt.x' has no attribute 'y'\nerror: SGLang needs dill, which\n",
            "error: SGLang needs dill, which",
        ),
        ("all is well\n", None),
    ],
)
def test_the_first_error_is_not_one_of_its_consequences(text: str, told: str | None) -> None:
    assert first_error(text) == told


KILLED = (
    "import os, sys; from pipeline.child_process import make_scratch; make_scratch('engine'); os.kill(os.getpid(), 9)"
)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "shm").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(child_process, "_SHARED", tmp_path / "shm")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def test_what_a_killed_process_left_goes_when_the_next_one_begins(root: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED], env={**child_process.os.environ, "TMPDIR": str(root)}, timeout=60)
    [left] = root.iterdir()
    mine = make_scratch("engine")
    assert list(root.iterdir()) == [mine]
    assert make_scratch("engine").exists()
    assert mine.exists(), "its maker lives"
    assert not left.exists()


def test_shared_memory_that_is_named_after_a_socket_goes_with_it(tmp_path: Path) -> None:
    mine = make_scratch("engine")
    (mine / "tmp1234").touch()
    own, other = tmp_path / "shm" / "sglang_loads_tmp1234_ab.shm", tmp_path / "shm" / "sglang_loads_tmp9_ab.shm"
    own.touch()
    other.touch()
    remove_scratch(mine)
    assert (mine.exists(), own.exists(), other.exists()) == (False, False, True)
    remove_scratch(mine)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home, without any variable of compiled kernels."""
    for name in (child_process.KERNEL_CACHE_VARIABLE, "XDG_CACHE_HOME", *child_process._KERNEL_CACHES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_compiled_kernels_outlive_the_scratch_folder(home: Path, tmp_path: Path) -> None:
    found = child_process.scratch_environment(tmp_path / "scratch")
    assert found.pop("TMPDIR") == str(tmp_path / "scratch")
    assert found["TRITON_CACHE_DIR"] == str(home / ".cache/evenkeel/kernels/triton")
    assert all(Path(folder).is_relative_to(home) for folder in found.values()), found
    assert {"TORCHINDUCTOR_CACHE_DIR", "TVM_FFI_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "SGLANG_DG_CACHE_DIR"} <= {
        *found
    }


def test_a_user_names_the_folder_of_kernels_or_of_one_compiler(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(child_process.KERNEL_CACHE_VARIABLE, str(tmp_path / "shared"))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    found = child_process.kernel_cache_environment()
    assert found["TRITON_CACHE_DIR"] == "/elsewhere"
    assert found["SGLANG_CACHE_DIR"] == str(tmp_path / "shared/sglang")
    assert not home.exists()


def test_a_folder_of_kernels_that_cannot_be_written_is_an_error_only_if_it_was_named(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = child_process.kernel_cache_environment()
    assert found["CUDA_CACHE_PATH"] == str(tmp_path / f"evenkeel_kernels_{os.getuid()}" / "nv")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    (tmp_path / "evenkeel_kernels_12345").mkdir()
    assert child_process.kernel_cache_environment() == {}, "another user's folder, who could have put any code there"
    monkeypatch.setenv(child_process.KERNEL_CACHE_VARIABLE, str(home / "kernels"))
    with pytest.raises(MachineError, match="cannot be written; name another one"):
        child_process.kernel_cache_environment()
