"""What a supervisor does when a unit ends. The units are doubles."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from launch.run import supervisor as supervising
from launch.run.processes import leave_fatal_note
from launch.run.starter import Unit, units_of
from launch.run.supervisor import FIRST_S, LOOK_S, RestartBudget, RunProgress, Supervisor
from pipeline.data.epochs import claim
from pipeline.data.files import temporary_name
from pipeline.data.membership import Member
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import DiskFullError, FatalError, RecipeError, RewardError, SupersededError
from tests.support.runs import a_recipe
from tests.support.whole_runs import whole_run

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
        recipe = a_recipe(root, run=dict(steps=1, max_restarts=2), model=dict(path=str(root)))
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
            self.starter.start,
            units_of(recipe),
            epoch,
            lambda: self.stop,
        )
        monkeypatch.setattr(supervising.time, "sleep", lambda _: self.script.pop(0)() if self.script else None)
        monkeypatch.setattr(supervising, "EPOCH_POLL_S", 0.0)
        monkeypatch.setattr(supervising, "FINISHED_POLL_S", 0.0)
        monkeypatch.setattr(supervising, "LONGEST_PAUSE_S", 0.0)
        self.supervisor.__post_init__()

    def end(self, unit: Unit, status: int, said: str = "out of memory") -> Callable[[], None]:
        def act() -> None:
            process = self.starter.processes(unit)[-1]
            process.status = status
            process.log.parent.mkdir(exist_ok=True)
            process.log.write_text(f"loading\nerror: {said}\n")

        return act

    def finish(self) -> None:
        self.run.set_finished("learner")
        self.run.set_finished("collector")
        self.end(LEARNER, 0)()
        self.end(COLLECTOR, 0)()

    def engine_is_up(self, index: int = 0) -> None:
        epoch = claim(self.run.path, "engine", index)
        self.run.membership().announce(Member(index, "http://127.0.0.1:1", epoch.number))


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
    with pytest.raises(FatalError, match="learner died 3 times without progress: out of memory; its log is"):
        case.supervisor.supervise()


def test_an_engine_that_never_comes_up_ends_the_run_when_its_budget_is_spent(case: Case) -> None:
    case.script = [case.end(ENGINE, 1)] * 3
    with pytest.raises(
        FatalError, match=r"engine-0 died 3 times .*: it never came up; out of memory; its log is .*3.log"
    ):
        case.supervisor.supervise()
    assert len(case.starter.processes(ENGINE)) == 3


def test_an_engine_that_ends_twice_with_the_same_words_ends_the_run(case: Case) -> None:
    """The numbers in them differ: the log's, a process's, the time. SGLang kills itself when a part of it fails."""
    said = "server was killed by signal 9 (SIGKILL) before it was up; the first error in {}.log: ValueError: seed"
    case.script = [case.end(ENGINE, 1, said.format(1)), case.end(ENGINE, 1, said.format(2))]
    with pytest.raises(FatalError, match="engine-0 ended twice in the same way, so it is not started again: it never"):
        case.supervisor.supervise()
    assert len(case.starter.processes(ENGINE)) == 2


@pytest.mark.parametrize(
    ("unit", "status", "words"),
    [
        (ENGINE, 1, ("server ended with status 1; the first error in a.log: a", "the first error in a.log: b")),
        (ENGINE, 1, ("server was killed by signal 9 (SIGKILL); a.log ends: ready",)),
        (ENGINE, 1, ("port 30000 is taken (Address already in use)",)),
        (ENGINE, 137, ("the first error in a.log: a",)),
        (LEARNER, 1, ("the first error in a.log: a",)),
    ],
    ids=["other words", "the log names no error", "a port", "the role was killed", "no engine"],
)
def test_an_end_that_the_next_start_may_be_spared_is_tried_again(
    case: Case, unit: Unit, status: int, words: tuple[str, ...]
) -> None:
    case.script = [*(case.end(unit, status, words[turn % len(words)]) for turn in range(2)), case.finish]
    assert case.supervisor.supervise() == "finished"
    assert len(case.starter.processes(unit)) == 3


def test_an_engine_alone_ends_no_run_that_another_serves(case: Case) -> None:
    other = Unit("engine", 1)
    case.supervisor.units = [*case.supervisor.units, other]
    case.script = [lambda: case.engine_is_up(1), *[case.end(ENGINE, 1)] * 5, case.finish]
    assert case.supervisor.supervise() == "finished"
    assert len(case.starter.processes(ENGINE)) == 6
    case.run.membership().withdraw(case.run.membership().engines()[0])
    case.script = [case.end(ENGINE, 1)]
    with pytest.raises(FatalError, match="engine-0 died"):
        case.supervisor._take(ENGINE, case.starter.processes(ENGINE)[-1], 1)


def test_one_that_dies_again_waits_longer_each_time(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "LONGEST_PAUSE_S", 30.0)
    budget = RestartBudget(limit=9)
    pauses = []
    for _ in range(9):
        budget.spend("learner", 0, "")
        pauses.append(budget.pause_s)
    assert pauses == [0, 1, 2, 4, 8, 16, 30, 30, 30]
    monkeypatch.setattr(RestartBudget, "spend", lambda budget, *_: setattr(budget, "pause_s", 3600.0))
    case.supervisor.units = [COLLECTOR]
    case.script = [case.end(COLLECTOR, 1), lambda: None, lambda: setattr(case, "stop", True)]
    assert case.supervisor.supervise() == "stopped", "a collector that is due is not one that has ended"
    assert len(case.starter.processes(COLLECTOR)) == 1


@pytest.mark.parametrize("status", [-9, 137, 143])
def test_an_engine_that_was_killed_while_it_started_is_started_again(case: Case, status: int) -> None:
    case.script = [case.end(ENGINE, status), case.finish]
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


@pytest.mark.parametrize(
    ("error", "saves"), [(RewardError("it fails"), True), (OSError("gone"), True), (DiskFullError("full"), False)]
)
def test_whatever_ends_the_run_a_healthy_learner_saves_first(
    case: Case, monkeypatch: pytest.MonkeyPatch, error: Exception, saves: bool
) -> None:
    """But on a full disk, where it cannot."""

    def fail() -> None:
        if isinstance(error, OSError):
            raise error
        leave_fatal_note(case.run, "collector-000001", error)
        case.end(COLLECTOR, 64)()

    def end_slowly(process: Process) -> None:
        if process is case.starter.processes(LEARNER)[0]:
            case.script = [*[lambda: None] * 5, lambda: setattr(process, "status", 143)]
        else:
            process.status = 143

    monkeypatch.setattr(supervising, "SERVERS_GRACE_S", 0.0)
    monkeypatch.setattr(Process, "terminate", end_slowly)
    case.script = [fail]
    with pytest.raises(type(error)), case.supervisor as supervisor:
        supervisor.supervise()
    assert (case.starter.processes(LEARNER)[0].status == 143) == saves
    assert all(process.status or process.killed for _, process in case.starter.started)


def test_a_file_system_that_does_not_answer_at_a_requested_stop_is_no_error(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Roles have saved by then; it is looked whether nothing was left to do."""

    def fail(_: RunDirectory) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(RunDirectory, "is_finished", fail)
    case.script = [lambda: setattr(case, "stop", True)]
    with case.supervisor as supervisor:
        assert supervisor.supervise() == "stopped"
    assert case.starter.processes(LEARNER)[0].asked


def test_a_file_system_that_does_not_answer_for_a_while_ends_nothing(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "NO_LOG_PAUSE_S", 0.0)
    listed, finished, stale = supervising.newest, case.run.is_finished, OSError(errno.ESTALE, "Stale file handle")
    down = False

    def asked(look: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*given: Any) -> Any:
            if down:
                raise stale
            return look(*given)

        return ask

    def switch(to: bool) -> Callable[[], None]:
        def act() -> None:
            nonlocal down
            down = to

        return act

    monkeypatch.setattr(supervising, "newest", asked(listed))
    monkeypatch.setattr(supervising, "announced", asked(lambda run, recipe: []))
    monkeypatch.setattr(RunDirectory, "is_finished", asked(lambda self: finished()))
    monkeypatch.setattr("pipeline.data.epochs.newest", asked(listed))
    case.script = [switch(True), case.end(COLLECTOR, -9), lambda: None, switch(False), lambda: None, case.finish]
    with case.supervisor as supervisor:
        assert supervisor.supervise() == "finished"
    assert [len(case.starter.processes(unit)) for unit in (LEARNER, COLLECTOR, ENGINE)] == [1, 2, 1]


def test_a_supervisor_ends_when_another_has_taken_over(case: Case) -> None:
    case.script = [lambda: [claim(case.run.path, "supervisor")].clear()]
    with pytest.raises(SupersededError), case.supervisor as supervisor:
        supervisor.supervise()
    assert all(process.killed for _, process in case.starter.started)


@pytest.mark.parametrize(("learner", "left"), [(0, 0), (65, 2)])
def test_files_that_killed_roles_left_go_with_the_last_role(case: Case, learner: int, left: int) -> None:
    """Not where a role was started by somebody else: it may be writing them."""
    case.run.make_folders()
    half = [temporary_name(folder / "000001.json") for folder in (case.run.updates, case.run.path / "engines")]

    def leave() -> None:
        for path in half:
            path.parent.mkdir(exist_ok=True)
            path.write_text("{")

    case.script = [leave, lambda: (case.finish(), case.end(LEARNER, learner)())[0]]
    with case.supervisor as supervisor:
        assert supervisor.supervise() == "finished"
        assert all(path.exists() for path in half)
    assert sum(path.exists() for path in half) == left


def test_the_same_words_end_the_run_unless_it_has_progressed_between() -> None:
    budget = RestartBudget(limit=9)
    for progress in (3, 4, 5):
        budget.spend("engine-0", progress, "the reason", "ended with status 3")
    with pytest.raises(
        FatalError, match="engine-0 ended twice in the same way, so it is not started again: the reason"
    ):
        budget.spend("engine-0", 5, "the reason", "ended with status 4")


def test_deaths_without_progress_end_the_run() -> None:
    budget = RestartBudget(limit=2)
    for progress in (3, 4, 4):
        budget.spend("engine-0", progress, "the reason")
    with pytest.raises(FatalError, match="engine-0 died 3 times without progress: the reason"):
        budget.spend("engine-0", 4, "the reason")


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
    time.sleep(0.02)  # a folder's time of change advances with the ticks of the kernel
    run.set_published(6)
    wait(LOOK_S)
    assert said[-1]["over"]
    wait(FIRST_S)
    assert len(said) == 2, "another wait as long as that is usual"
