"""Temporary files of a process go with it, and those of one that was killed with the next one's start."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pipeline import scratch
from pipeline.scratch import make_scratch, remove_scratch, scratch_environment

KILLED = "import os, sys; from pipeline.scratch import make_scratch; make_scratch('engine'); os.kill(os.getpid(), 9)"


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "shm").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(scratch, "_SHARED", tmp_path / "shm")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def test_what_a_killed_process_left_goes_when_the_next_one_begins(root: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED], env={**scratch.os.environ, "TMPDIR": str(root)}, timeout=60)
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


def test_what_was_compiled_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    told = scratch_environment(make_scratch("engine"))
    assert Path(told["TORCHINDUCTOR_CACHE_DIR"]).parent == root
    assert Path(told["TMPDIR"]).parent == root
