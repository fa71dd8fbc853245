"""One supervisor a run."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from launch.run import claim as claiming
from launch.run.claim import claimed
from pipeline.data.epochs import Epoch, claim
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RunConflictError, StoreError


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setattr(claiming, "BEAT_S", 0.05)
    monkeypatch.setattr(claiming, "WATCH_S", 2.0)
    return RunDirectory(tmp_path)


def test_a_second_one_is_refused_while_the_first_is_at_work(run: RunDirectory) -> None:
    second = claimed(run)
    with claimed(run) as first, pytest.raises(RunConflictError, match=r"being trained by another process \(host "):
        second.__enter__()
    assert not first.is_superseded()


def test_what_a_dead_one_left_behind_is_no_obstacle(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claiming, "WATCH_S", 0.5)
    with claimed(run):
        left = (run.path / "epochs/supervisor/ALIVE").read_text()
    assert not (run.path / "epochs/supervisor/ALIVE").exists()
    (run.path / "epochs/supervisor/ALIVE").write_text(left)
    with claimed(run) as second:
        assert second.number == 2


def test_one_that_takes_over_is_not_refused_and_refuses_others(run: RunDirectory) -> None:
    second = claimed(run)
    with claimed(run) as first, claimed(run, takes_over=True) as later:
        assert (first.is_superseded(), later.is_superseded()) == (True, False)
        with pytest.raises(RunConflictError, match="being trained by another process"):
            second.__enter__()
    assert not later.is_superseded()


def test_one_that_was_superseded_leaves_its_successor_alone(run: RunDirectory) -> None:
    alive = run.path / "epochs/supervisor/ALIVE"
    with claimed(run):
        claim(run.path, "supervisor")
    assert alive.exists()


def test_a_pointer_that_cannot_be_read_does_not_end_the_heartbeat(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def fails_once(epoch: Epoch) -> bool:
        if not failed.is_set():
            failed.set()
            raise StoreError("damaged")
        return False

    monkeypatch.setattr(Epoch, "is_superseded", fails_once)
    alive = run.path / "epochs/supervisor/ALIVE"
    with claimed(run):
        assert failed.wait(20)
        ends = time.monotonic() + 20
        while alive.read_text().startswith("1.0,"):
            assert time.monotonic() < ends, "no heartbeat followed"
            time.sleep(0.01)
