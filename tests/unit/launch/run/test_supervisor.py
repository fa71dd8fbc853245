"""In which order a run's processes start. Nothing is started here."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from launch.run import supervisor
from launch.run.supervisor import Supervisor
from pipeline.config.loader import recipe_from
from pipeline.data.run_directory import RunDirectory


class Process:
    """Runs until it is told otherwise; `popen` is itself."""

    def __init__(self, log: Path) -> None:
        self.popen, self.log, self.status = self, log, None

    def poll(self) -> int | None:
        return self.status

    def stop(self) -> None:
        """Nothing to stop."""


class Quiet:
    def event(self, *_: Any, **__: Any) -> None:
        """Written nowhere."""

    def refresh(self) -> None:
        """Shown nowhere."""


@pytest.mark.parametrize(
    ("channel", "cuda", "order"),
    [
        ("ipc", True, ["engine", "up", "learner", "collector"]),
        ("ipc", False, ["engine", "learner", "up", "collector"]),
        ("disk", True, ["engine", "learner", "up", "collector"]),
    ],
)
def test_a_learner_that_shares_the_engines_gpu_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, channel: str, cuda: bool, order: list[str]
) -> None:
    """An engine takes a share of the memory that is free when it starts."""
    happened: list[str] = []
    ready: Future[float] = Future()
    data = dict(
        run=dict(name="r", root=str(tmp_path), steps=1),
        model=dict(path=str(tmp_path)),
        task=dict(name="sort_digits"),
        weights=dict(channel=channel),
    )
    recipe = recipe_from(data, source="test")
    run = RunDirectory(recipe.directory)
    run.freeze(recipe)
    processes: dict[str, Process] = {}

    def start_engine(supervisor: Supervisor) -> None:
        happened.append("engine")
        supervisor.starting["engine-0"] = ready

    def start_program(supervisor: Supervisor, name: str) -> None:
        happened.append(name)
        processes[name] = supervisor.programs[name] = Process(tmp_path / name)  # type: ignore[assignment]

    def pass_time(_: float) -> None:
        if not ready.done():
            happened.append("up")
            ready.set_result(1.0)
        elif len(processes) == 2:
            for process in processes.values():
                process.status = 0

    monkeypatch.setattr(supervisor, "has_cuda", lambda: cuda)
    monkeypatch.setattr(supervisor, "check_engines", lambda recipe: None)
    monkeypatch.setattr(Supervisor, "_start_engines", start_engine)
    monkeypatch.setattr(Supervisor, "_start_program", start_program)
    monkeypatch.setattr(supervisor.time, "sleep", pass_time)
    with Supervisor(run, recipe, Quiet(), Quiet()) as one:  # type: ignore[arg-type]
        one.supervise()
    assert happened == order
