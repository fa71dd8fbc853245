"""What a supervisor does when a unit ends. The units are doubles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from launch.cluster.starter import Unit, units_of
from launch.run import supervisor as supervising
from launch.run.fatal_notes import leave_fatal_note
from launch.run.supervisor import Supervisor
from pipeline.config.loader import recipe_from
from pipeline.data.epochs import claim
from pipeline.data.membership import Member
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import FatalError, RecipeError, SupersededError

LEARNER, COLLECTOR, ENGINE = Unit("learner"), Unit("collector"), Unit("engine", 0)


class Process:
    """Runs until it is told otherwise."""

    def __init__(self, log: Path) -> None:
        self.log, self.status, self.asked, self.killed = log, None, False, False

    def poll(self) -> int | None:
        return self.status

    def terminate(self) -> None:
        self.asked = True
        self.status = 143

    def kill(self) -> None:
        self.killed = True


@dataclass
class Starter:
    """Notes what is started."""

    started: list[tuple[Unit, Process]] = field(default_factory=list)

    def start(self, unit: Unit, log: Path) -> Process:
        self.started.append((unit, Process(log)))
        return self.started[-1][1]

    def processes(self, unit: Unit) -> list[Process]:
        return [process for one, process in self.started if one == unit]


class Quiet:
    def event(self, *_: Any, **__: Any) -> None:
        """Written nowhere."""

    def refresh(self) -> None:
        """Shown nowhere."""


class Case:
    """A supervisor of a run, and a script: what happens at each of its looks."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        data = dict(
            run=dict(name="r", root=str(root), steps=1, max_restarts=2),
            model=dict(path=str(root)),
            task=dict(name="sort_digits"),
        )
        recipe = recipe_from(data, source="test")
        self.run = RunDirectory(recipe.directory)
        self.run.freeze(recipe)
        self.run.set_published(0)
        self.starter, self.stop = Starter(), False
        self.script: list[Callable[[], None]] = []
        epoch = claim(self.run.path, "supervisor")
        self.supervisor = Supervisor(
            self.run,
            recipe,
            Quiet(),  # type: ignore[arg-type]
            Quiet(),  # type: ignore[arg-type]
            self.starter,
            units_of(recipe),
            epoch,
            lambda: self.stop,
        )
        monkeypatch.setattr(supervising.time, "sleep", lambda _: self.script.pop(0)() if self.script else None)
        monkeypatch.setattr(supervising, "EPOCH_POLL_S", 0.0)
        monkeypatch.setattr(supervising, "FINISHED_POLL_S", 0.0)
        self.supervisor.__post_init__()

    def end(self, unit: Unit, status: int) -> Callable[[], None]:
        def act() -> None:
            process = self.starter.processes(unit)[-1]
            process.status = status
            process.log.parent.mkdir(exist_ok=True)
            process.log.write_text("loading\nerror: out of memory\n")

        return act

    def finish(self) -> None:
        self.run.set_finished("learner")
        self.run.set_finished("collector")
        self.end(LEARNER, 0)()
        self.end(COLLECTOR, 0)()

    def engine_is_up(self) -> None:
        epoch = claim(self.run.path, "engine", 0)
        self.run.membership().announce(Member(0, "http://127.0.0.1:1", epoch.number))


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    return Case(tmp_path, monkeypatch)


def test_a_run_ends_with_its_learner_and_its_collector(case: Case) -> None:
    case.script = [case.finish]
    with case.supervisor as supervisor:
        assert supervisor.supervise() == "finished"
    assert [unit for unit, _ in case.starter.started] == [ENGINE, LEARNER, COLLECTOR]
    assert case.starter.processes(ENGINE)[0].asked


def test_what_dies_is_started_again_with_a_log_of_its_own(case: Case) -> None:
    case.script = [case.end(COLLECTOR, -9), case.finish]
    with case.supervisor as supervisor:
        supervisor.supervise()
    assert [process.log.name for process in case.starter.processes(COLLECTOR)] == [
        "collector-000001.log",
        "collector-000002.log",
    ]


def test_one_that_dies_again_and_again_ends_the_run(case: Case) -> None:
    case.script = [case.end(LEARNER, 1)] * 3
    with pytest.raises(FatalError, match="learner died 3 times without progress: error: out of memory"):
        case.supervisor.supervise()


def test_an_engine_that_never_came_up_ends_the_run(case: Case) -> None:
    case.script = [case.end(ENGINE, 1)]
    with pytest.raises(FatalError, match="engine-0 never came up: out of memory"):
        case.supervisor.supervise()


def test_another_host_of_an_engine_is_started_again(case: Case) -> None:
    other_host = Unit("engine", 0, 1)
    case.supervisor.units = [*case.supervisor.units, other_host]
    case.script = [case.end(other_host, 1), case.finish]
    case.supervisor.supervise()
    assert len(case.starter.processes(other_host)) == 2


@pytest.mark.parametrize("status", [-9, 137, 143])
def test_an_engine_that_was_killed_while_it_started_is_started_again(case: Case, status: int) -> None:
    case.script = [case.end(ENGINE, status), case.finish]
    case.supervisor.supervise()
    assert len(case.starter.processes(ENGINE)) == 2


def test_an_engine_that_was_up_is_started_again(case: Case) -> None:
    case.script = [case.engine_is_up, lambda: None, case.end(ENGINE, 1), case.finish]
    case.supervisor.supervise()
    assert len(case.starter.processes(ENGINE)) == 2


def test_a_fatal_end_ends_the_run_with_the_reason_that_was_left(case: Case) -> None:
    def fail() -> None:
        leave_fatal_note(case.run, "learner-000001", RecipeError("the model is gone"))
        case.end(LEARNER, 64)()

    leave_fatal_note(case.run, "learner-000001", RecipeError("an old reason"))
    case.supervisor.__post_init__()
    case.script = [fail]
    with pytest.raises(FatalError, match=r"^the model is gone$"):
        case.supervisor.supervise()


def test_a_unit_that_was_started_elsewhere_is_left_alone(case: Case) -> None:
    case.script = [case.end(LEARNER, 65), case.end(COLLECTOR, 0), lambda: None, case.finish]
    with case.supervisor as supervisor:
        assert supervisor.supervise() == "finished"
    assert len(case.starter.processes(LEARNER)) == 1


def test_asked_to_stop_the_loops_end_before_the_engines(case: Case) -> None:
    def ask() -> None:
        case.stop = True

    asked_before: list[bool] = []
    learner_ends = Process.terminate

    def terminate(process: Process) -> None:
        asked_before.append(case.starter.processes(ENGINE)[0].asked)
        learner_ends(process)

    case.script = [ask]
    with pytest.MonkeyPatch.context() as patch, case.supervisor as supervisor:
        patch.setattr(Process, "terminate", terminate)
        assert supervisor.supervise() == "stopped"
        assert asked_before == [False, False]
        assert case.starter.processes(LEARNER)[0].asked
    assert case.starter.processes(ENGINE)[0].asked


def test_a_supervisor_ends_when_another_has_taken_over(case: Case) -> None:
    case.script = [lambda: [claim(case.run.path, "supervisor")].clear()]
    with pytest.raises(SupersededError), case.supervisor as supervisor:
        supervisor.supervise()
    assert all(process.killed for _, process in case.starter.started)
