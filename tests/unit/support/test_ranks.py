"""Ranks that fork from a loaded process: results, errors, hangs, and nothing left behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from launch.run import processes
from launch.run.processes import torchrun
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import FatalError
from tests.support.rank_bodies import add_up, die, leave_a_child, raise_on_rank_one, what_is_loaded
from tests.support.rank_programs import forked_programs
from tests.support.ranks import ROOT, RankFailedError, Ranks, run_ranks

ORPHANS = """
import time
from tests.support import ranks
from tests.support.rank_bodies import hang
ranks.PRELOADED = ()
started = ranks.Ranks(2, hang)
print(*(process.pid for process in started._processes), flush=True)
time.sleep(600)
"""


def test_ranks_form_a_world_and_answer_in_order() -> None:
    assert run_ranks(3, add_up, 10.0) == [(0, 33.0), (1, 33.0), (2, 33.0)]


def test_megatron_is_loaded_before_a_rank_begins() -> None:
    began = time.monotonic()
    (loaded,) = run_ranks(1, what_is_loaded)
    assert {"torch", "megatron.core", "megatron_bridge.learner"} <= set(loaded)
    assert not {"wandb", "torch.utils.tensorboard"} & set(loaded), "Megatron-Core would draw its own timers"
    assert time.monotonic() - began < 60


def test_an_error_reaches_the_test_with_its_traceback() -> None:
    with pytest.raises(RankFailedError, match=r"(?s)rank 1: .*in raise_on_rank_one.*ValueError: the reason") as raised:
        run_ranks(2, raise_on_rank_one)
    assert "rank 0 was still at work" in str(raised.value), "it waited for rank 1"
    assert "said before" in str(raised.value)


def test_a_rank_that_dies_is_reported() -> None:
    with pytest.raises(RankFailedError, match="rank 0: died with exit code 7"):
        run_ranks(1, die, 7)


def test_arguments_that_cannot_be_pickled_leave_nothing_behind() -> None:
    with pytest.raises(TypeError, match="pickle"):
        run_ranks(1, add_up, sys.stdout.buffer)
    gc.collect()  # what is collected without having been closed warns, and a warning is an error


def test_ranks_that_hang_show_where_and_are_killed_with_their_children(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with Ranks(1, leave_a_child, begun) as ranks:
        ends = time.monotonic() + 60
        while not begun.exists():
            ranks.check()
            assert time.monotonic() < ends, "the rank did not begin"
            time.sleep(0.01)
        with pytest.raises(RankFailedError, match=r"(?s)still at work after 1 s.*in leave_a_child"):
            ranks.results(1.0)
        pid = ranks._processes[0].pid
        tree = [psutil.Process(pid), *psutil.Process(pid).children()]
        assert len(tree) == 2
    _, alive = psutil.wait_procs(tree, timeout=5)
    assert alive == []


def test_ranks_end_with_a_killed_test() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ORPHANS],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as test:
        assert test.stdout is not None
        started = [psutil.Process(int(pid)) for pid in test.stdout.readline().split()]
        assert len(started) == 2
        test.kill()
    _, alive = psutil.wait_procs(started, timeout=120)  # they import torch, on a busy machine slowly
    assert alive == []


def test_a_program_gets_its_arguments_environment_and_log(tmp_path: Path) -> None:
    command = torchrun(2, "tests.support.rank_program", str(tmp_path), "0")
    with forked_programs():
        processes.run_ranks(run_in(tmp_path), command, log=tmp_path / "log", env={**os.environ, "SAID": "so"})
    assert sorted(path.name for path in tmp_path.glob("rank*")) == ["rank-0-of-2-so", "rank-1-of-2-so"]
    assert "rank 1 was here" in (tmp_path / "log").read_text()


def test_a_program_that_fails_is_the_error_that_torchrun_would_give(tmp_path: Path) -> None:
    command = torchrun(2, "tests.support.rank_program", str(tmp_path), "3")
    with forked_programs(), pytest.raises(FatalError, match="the log died: ValueError: told to fail"):
        processes.run_ranks(run_in(tmp_path), command, log=tmp_path / "log", env=os.environ)


def run_in(folder: Path) -> RunDirectory:
    run = RunDirectory(folder)
    run.logs.mkdir()
    return run
