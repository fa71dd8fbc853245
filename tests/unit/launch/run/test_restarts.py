"""Starts of a role that nobody supervises: those without progress are counted, and progress forgives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.roles.lifecycle import run_role
from launch.run.restarts import MAX_RESTARTS_VARIABLE, count_start
from launch.run.waiting import Stop
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import FatalError, RetryableError, StoppedError

TWICE = {MAX_RESTARTS_VARIABLE: "2"}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def published(run: RunDirectory, version: int) -> None:
    run.policies.mkdir(parents=True, exist_ok=True)
    run.set_published(version)


def test_a_role_is_started_again_as_often_as_the_recipe_says(run: RunDirectory) -> None:
    for _ in range(3):
        count_start(run, "learner", TWICE)
    count_start(run, "collector", TWICE)
    with pytest.raises(FatalError, match=r"learner was started again 2 times in a row without progress"):
        count_start(run, "learner", TWICE)
    count_start(run, "learner", TWICE)  # somebody has seen to it, and applied the run again


def test_progress_forgives_all_restarts_before_it(run: RunDirectory) -> None:
    """So that a run of weeks does not end for a handful of lost nodes."""
    for version in range(20):
        published(run, version)
        for _ in range(3):
            count_start(run, "engine-1", TWICE)


def test_who_was_asked_to_end_may_start_as_often_as_it_is_asked(run: RunDirectory) -> None:
    for _ in range(20):
        count_start(run, "learner", TWICE)
        count_start(run, "learner", TWICE, back=True)


def test_under_a_supervisor_and_beside_node_0_nobody_counts(run: RunDirectory) -> None:
    for environment in ({}, {**TWICE, "EVENKEEL_NODE": "1"}):
        for _ in range(20):
            count_start(run, "learner", environment)
    assert not run.path.exists()


def test_a_role_counts_as_it_runs(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its third restart without progress is fatal, and Kubernetes starts nothing again."""
    statuses: list[int] = []

    def ended(status: int) -> None:
        statuses.append(status)
        raise SystemExit

    def fails(_: Stop) -> int:
        raise RetryableError("lost its node")

    def stops(_: Stop) -> int:
        raise StoppedError("asked to end")

    monkeypatch.setenv(MAX_RESTARTS_VARIABLE, "2")
    monkeypatch.setattr("launch.roles.lifecycle.end_process", ended)
    monkeypatch.setattr("launch.run.waiting.Stop.install", lambda stop: stop)
    for body in (fails, stops, stops, fails, fails, fails):
        with pytest.raises(SystemExit):
            run_role(run, "learner", body)
    assert statuses == [1, 143, 143, 1, 1, 64]
