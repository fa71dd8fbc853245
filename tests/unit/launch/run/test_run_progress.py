"""A run that leaves nothing new says so, whoever hangs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from launch.run.supervisor import FIRST_S, LOOK_S, RunProgress
from pipeline.data.run_directory import RunDirectory
from tests.support.whole_runs import whole_run


def test_a_run_that_stands_still_is_told_until_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, said, now = whole_run(tmp_path), list[dict[str, Any]](), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = RunProgress(run, lambda kind, **fields: said.append(dict(kind=kind, **fields)))

    def wait(seconds: float) -> None:
        for _ in range(int(seconds / LOOK_S)):
            now[0] += LOOK_S
            progress.look()

    wait(FIRST_S)
    assert said == []
    wait(2 * LOOK_S)
    [notice] = said
    assert (notice["kind"], notice["who"], notice["over"]) == ("no_progress", "the run", False)
    assert notice["waits_for"].startswith("a batch, a step, a publish")
    run.set_published(6)
    wait(LOOK_S)
    assert said[-1]["over"]
    wait(FIRST_S)
    assert len(said) == 2, "another wait as long as that is usual"


def test_a_run_may_be_watched_before_its_learner_has_begun_it(tmp_path: Path) -> None:
    """Under Slurm the supervisor starts the learner, whose start makes the run's folders."""
    run = RunDirectory(tmp_path / "run")
    RunProgress(run, lambda kind, **fields: None).look()
    assert run.trained_at_ns() == 0
    run.make_folders()
    assert run.trained_at_ns() > 0
