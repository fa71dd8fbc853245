"""The sandbox of a run whose folder holds many other runs, or whose own folder holds many files."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launch.build.rewards import build_verifiers
from pipeline.config.recipe import Recipe
from pipeline.data.event_log import EventLog, read_events
from pipeline.data.run_directory import RunDirectory
from pipeline.rewards.sandbox.choice import MOST_MOUNTS_AT_FIRST
from tests.support.sandboxes import sandbox_of

REWARD = "crowded_folder:lists"
TASK = cast("Any", SimpleNamespace(reward=REWARD))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the command is given in. Its reward function says how many entries it sees in a folder."""
    for rung in ("bubblewrap", "landlock"):
        sandbox_of(rung)
    project = tmp_path / "project"
    (project / "runs/demo").mkdir(parents=True)
    (project / "crowded_folder.py").write_text(
        "import os\n\n\ndef lists(response):\n"
        "    return float(len(os.listdir(response))) if os.path.isdir(response) else -1.0\n"
    )
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(str(project))
    return project


def begin(run: RunDirectory, *folders: Path) -> list[float]:
    """Start the run's verifiers; what they see in the folders, -1 for one that is not there."""
    recipe = Recipe.model_validate(
        dict(
            run=dict(name="demo", steps=1),
            model=dict(path=run.path),
            task=dict(name="sort_digits"),
            reward=dict(workers=1),
        )
    )

    async def score() -> list[float]:
        with build_verifiers(run, recipe, TASK, EventLog(run.path, "collector-000001")) as verifiers:
            return [(await verifiers[REWARD].score("", str(folder), "")).reward for folder in folders]

    return asyncio.run(score())


def fill(folder: Path, count: int) -> None:
    for number in range(count):
        (folder / f"{number}.json").touch()


def rungs(run: RunDirectory) -> list[str]:
    return [event["rung"] for event in read_events(run.path, "sandbox")]


def test_other_runs_beside_a_run_take_no_mounts_and_are_not_there(project: Path) -> None:
    for number in range(MOST_MOUNTS_AT_FIRST + 100):
        (project / f"runs/{number}").mkdir()
    (project / "data").mkdir()
    fill(project / "data", MOST_MOUNTS_AT_FIRST + 100)
    run = RunDirectory(project / "runs/demo")
    seen = begin(run, project / "data", project / "runs/1", run.path)
    assert rungs(run) == ["bubblewrap"]
    assert seen == [MOST_MOUNTS_AT_FIRST + 100, -1, -1]


def test_a_folder_of_too_many_files_takes_the_next_rung(project: Path) -> None:
    fill(project, MOST_MOUNTS_AT_FIRST + 100)
    run = RunDirectory(project / "runs/demo")
    begin(run)
    (event,) = read_events(run.path, "sandbox")
    assert event["rung"] == "landlock"
    assert f"{project} holds 60" in event["why"]
    assert f"at most {MOST_MOUNTS_AT_FIRST} one by one; move them into a folder there" in event["why"]
