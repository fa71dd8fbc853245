"""Whose turn it is on GPUs that learner and engines share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.data.run_directory import RunDirectory
from pipeline.errors import DeadlineExceededError, SupersededError
from pipeline.trainer.turns import GpuLock

HOLDS = """
import sys
from pathlib import Path
from pipeline.data.run_directory import RunDirectory
from pipeline.trainer.turns import GpuLock
GpuLock(RunDirectory(Path(sys.argv[1]))).take(1.0, shared=bool(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


def holder(run: Path, shared: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(run), shared], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_engines_start_together_and_not_while_the_learner_holds_the_memory(tmp_path: Path) -> None:
    with holder(tmp_path, shared="") as learner:
        engine = GpuLock(RunDirectory(tmp_path))
        with pytest.raises(DeadlineExceededError, match="the learner trains"):
            engine.take(0.1, shared=True)
        learner.kill()  # the kernel frees it
        learner.wait()
    engine.take(1.0, shared=True)
    engine.take(1.0, shared=True)
    GpuLock(RunDirectory(tmp_path)).take(1.0, shared=True)
    with pytest.raises(DeadlineExceededError, match="an engine is starting"):
        GpuLock(RunDirectory(tmp_path)).take(0.1)


def test_the_learner_waits_until_no_engine_is_starting_and_may_be_asked_meanwhile(tmp_path: Path) -> None:
    def superseded() -> None:
        raise SupersededError("a later start has begun")

    engine, learner = GpuLock(RunDirectory(tmp_path)), GpuLock(RunDirectory(tmp_path))
    engine.take(1.0, shared=True)
    with pytest.raises(SupersededError):
        learner.take(60.0, superseded)
    engine.release()
    engine.release()
    learner.take(1.0)
