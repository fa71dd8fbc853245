"""The program in the batch script: what follows from how an attempt ended, its key, and the commands of the roles."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from launch.build.api_key import JOB_KEYS
from launch.run.starter import NoRoomError, Unit
from launch.run.supervisor import Supervisor
from launch.schedulers.slurm import batch
from launch.schedulers.slurm.batch import BatchJob, Signals, api_key, role_environment, role_program, run_job
from launch.schedulers.slurm.placement import Shape
from launch.schedulers.slurm.srun import Allocation, SlurmError
from pipeline.config.loader import load_recipe
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import FatalError, RunConflictError
from tests.support.runs import ROOT


class Said(Allocation):
    """Notes what would be asked of Slurm."""

    orders: list[str]
    preempted = False
    away = 0
    """So often the controller does not answer."""

    def _ask(self) -> None:
        if self.away:
            self.away -= 1
            raise SlurmError("scontrol ended with 1: Unable to contact slurm controller (connect failure)")

    def is_preempted(self) -> bool:
        self._ask()
        return self.preempted

    def requeue(self) -> None:
        self._ask()
        self.orders.append("requeue")

    def submit_next(self, script: Path) -> str:
        self._ask()
        self.orders.append(f"submit {script.name}")
        return "8"


@pytest.fixture
def job(tmp_path: Path) -> BatchJob:
    recipe = load_recipe(Path("demo"), [f"run.root={tmp_path}/runs"])
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    return BatchJob.parse([str(tmp_path), "--gpus-per-node", "0", "--grace", "60", "--key-dir", str(tmp_path / "keys")])


@pytest.fixture
def allocation() -> Said:
    said = Said("7", 0, "n1", 8)
    said.orders = []
    return said


def attempt(monkeypatch: pytest.MonkeyPatch, body: Callable[[], str]) -> None:
    """What supervising the roles does instead."""
    monkeypatch.setattr(batch, "attempt", lambda *_: body())


def published(job: BatchJob, version: int) -> None:
    run = RunDirectory(load_recipe(job.folder / "recipe.yaml").directory)
    run.policies.mkdir(parents=True, exist_ok=True)
    run.set_published(version)


def test_a_signal_counts_where_its_line_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        signals = Signals()
        signals.note(signal.SIGUSR1)
        signals.note(signal.SIGTERM)
        monkeypatch.undo()
        assert (signals.time_limit, signals.end) == (True, True)
        with suppress(OSError):
            full.close()


def test_a_finished_run_is_not_submitted_again(
    job: BatchJob, allocation: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt(monkeypatch, lambda: "finished")
    signals = Signals()
    signals.time_limit = True
    assert (run_job(job, allocation, signals), allocation.orders) == (0, [])


def test_a_job_of_a_finished_run_starts_nothing(
    job: BatchJob, allocation: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless its recipe has more steps: then nobody finds the run finished."""
    recipe = load_recipe(job.folder / "recipe.yaml")
    run = RunDirectory(recipe.directory)
    run.freeze(recipe)
    for role in ("learner", "collector"):
        run.set_finished(role)
    assert run_job(job, allocation, Signals()) == 0
    assert run.is_finished()
    longer = recipe.model_copy(update=dict(run=recipe.run.model_copy(update=dict(steps=recipe.run.steps + 1))))
    (job.folder / "recipe.yaml").write_text(longer.to_yaml())
    monkeypatch.setattr(Supervisor, "supervise", lambda _: pytest.fail("finished") if run.is_finished() else "stopped")
    assert run_job(job, allocation, Signals()) == 0


def test_a_recipe_that_is_refused_leaves_a_finished_run_finished(job: BatchJob, allocation: Said) -> None:
    recipe = load_recipe(job.folder / "recipe.yaml")
    run = RunDirectory(recipe.directory)
    run.freeze(recipe)
    run.set_published(1)
    for role in ("learner", "collector"):
        run.set_finished(role)
    longer = recipe.run.model_copy(update=dict(steps=recipe.run.steps + 1, seed=recipe.run.seed + 1))
    (job.folder / "recipe.yaml").write_text(recipe.model_copy(update=dict(run=longer)).to_yaml())
    with pytest.raises(RunConflictError, match=r"run\.seed"):
        run_job(job, allocation, Signals())
    assert run.is_finished()


@pytest.mark.parametrize(("sent", "orders"), [("time_limit", ["submit job.sbatch"]), ("end", [])])
def test_the_time_limit_goes_on_in_a_further_job_and_a_request_to_end_does_not(
    job: BatchJob, allocation: Said, monkeypatch: pytest.MonkeyPatch, sent: str, orders: list[str]
) -> None:
    signals = Signals()

    def stopped() -> str:
        setattr(signals, sent, True)
        published(job, 3)
        return "stopped"

    attempt(monkeypatch, stopped)
    assert (run_job(job, allocation, signals), allocation.orders) == (0, orders)


@pytest.mark.parametrize("sent", [None, "time_limit"], ids=["SIGTERM to the roles", "the signal for the time limit"])
@pytest.mark.parametrize("resubmit", [True, False])
def test_a_preempted_job_saves_and_requeues_itself(
    job: BatchJob, allocation: Said, monkeypatch: pytest.MonkeyPatch, sent: str | None, resubmit: bool
) -> None:
    """However often, and whether or not it has reached anything: that is the scheduler's wish, and no fault."""
    monkeypatch.setattr(batch, "REQUEUED_S", 0)
    attempt(monkeypatch, lambda: "stopped")
    allocation.preempted = True
    signals = Signals()
    signals.time_limit = sent is not None
    given = dataclasses.replace(job, resubmit=resubmit)
    for _ in range(7):
        run_job(given, allocation, signals)
    assert allocation.orders == ["requeue"] * 7


@pytest.mark.parametrize("preempted", [False, True])
@pytest.mark.parametrize("away", [1, 3])
def test_a_controller_that_is_away_for_a_moment_is_asked_again(
    job: BatchJob, allocation: Said, monkeypatch: pytest.MonkeyPatch, preempted: bool, away: int
) -> None:
    """Else the chain of jobs would end there, and nobody would say so."""
    monkeypatch.setattr(batch, "REQUEUED_S", 0)
    monkeypatch.setattr(batch, "ASK_PAUSE_S", 0.0)
    signals = Signals()

    def stopped() -> str:
        published(job, 3)
        signals.note(signal.SIGUSR1)
        allocation.away, allocation.preempted = away, preempted
        return "stopped"

    attempt(monkeypatch, stopped)
    run_job(job, allocation, signals)
    assert allocation.orders == (["requeue"] if preempted else ["submit job.sbatch"])


def test_a_controller_that_does_not_say_whether_it_preempts_gets_the_next_job(
    job: BatchJob, allocation: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(batch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(batch.time, "sleep", lambda seconds: now.append(now.pop() + seconds))

    def go_on(version: int, away: int) -> int:
        signals = Signals()

        def stopped() -> str:
            published(job, version)
            signals.note(signal.SIGUSR1)
            now[0] += 40.0  # of a grace time of 60 s
            allocation.away = away
            return "stopped"

        attempt(monkeypatch, stopped)
        return run_job(job, allocation, signals)

    assert (go_on(3, away=3), allocation.orders) == (0, ["submit job.sbatch"])
    assert now[0] < 60.0
    with pytest.raises(SlurmError, match="Unable to contact"):
        go_on(4, away=99)


def test_too_few_nodes_wait_for_a_controller_that_is_away(
    job: BatchJob, allocation: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room() -> str:
        allocation.away = 50
        raise NoRoomError("engine-0 has room on none of the nodes that are up")

    monkeypatch.setattr(batch.time, "sleep", lambda seconds: None)
    attempt(monkeypatch, no_room)
    run_job(job, allocation, Signals())
    assert allocation.orders == ["requeue"]


def test_a_job_that_reached_nothing_is_not_submitted_again(
    job: BatchJob, allocation: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(job, 3)
    signals = Signals()
    signals.time_limit = True
    attempt(monkeypatch, lambda: "stopped")
    with pytest.raises(FatalError, match="the time limit came before the run had sampled a batch, saved"):
        run_job(job, allocation, signals)
    assert allocation.orders == []


def test_a_job_that_only_saved_goes_on(job: BatchJob, allocation: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that is longer than a job publishes nothing in it."""
    published(job, 3)
    signals = Signals()
    signals.time_limit = True

    def saves() -> str:
        saved = RunDirectory(load_recipe(job.folder / "recipe.yaml").directory).checkpoints / "000005"
        saved.mkdir(parents=True)
        (saved / "COMMIT").touch()
        return "stopped"

    attempt(monkeypatch, saves)
    assert (run_job(job, allocation, signals), allocation.orders) == (0, ["submit job.sbatch"])


def test_a_job_goes_on_where_the_file_system_does_not_say_what_it_has_reached(
    job: BatchJob, allocation: Said, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stale(_: RunDirectory) -> list[int]:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def stopped() -> str:
        signals.note(signal.SIGUSR1)
        monkeypatch.setattr(RunDirectory, "saved_steps", stale)
        return "stopped"

    published(job, 3)
    signals = Signals()
    attempt(monkeypatch, stopped)
    assert (run_job(job, allocation, signals), allocation.orders) == (0, ["submit job.sbatch"])
    assert "the run is taken to have come further" in capsys.readouterr().err


def test_a_file_system_that_fails_is_told_in_one_line_and_the_job_may_be_submitted_again(
    job: BatchJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/runs/demo")

    for name, value in dict(SLURM_JOB_ID="7", SLURMD_NODENAME="n1", EVENKEEL_GRACE_S="9").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["batch", str(job.folder), "--gpus-per-node", "0", "--grace", "60"])
    monkeypatch.setattr(Signals, "install", lambda signals: signals)
    monkeypatch.setattr(batch, "run_job", fails)
    with pytest.raises(SystemExit) as ended:
        batch.main()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: /runs/demo: Input/output error (EIO); ")
    assert line.endswith("; submit the job again")


def test_a_job_that_gets_nowhere_is_not_requeued_for_ever(
    job: BatchJob, allocation: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress begins the count anew, and so does a job that is submitted again."""
    reached = [*[0] * 5, 1, *[1] * 6, 1]
    attempts = iter(reached)

    def no_room() -> str:
        published(job, next(attempts))
        raise NoRoomError("engine-0 has room on none of the nodes that are up")

    published(job, 0)
    monkeypatch.setattr(batch, "REQUEUED_S", 0)
    attempt(monkeypatch, no_room)
    for _ in reached[:-2]:
        run_job(job, allocation, Signals())
    with pytest.raises(
        FatalError, match=r"none of the nodes that are up; the job has requeued itself 5 times in a row"
    ):
        run_job(job, allocation, Signals())
    assert allocation.orders == ["requeue"] * 11
    assert run_job(job, allocation, Signals()) == 1


def test_requeues_count_in_a_row(job: BatchJob, allocation: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those before an attempt that ended otherwise; and none that has reached something."""
    recipe = load_recipe(job.folder / "recipe.yaml", ["run.max_restarts=1"])
    (job.folder / "recipe.yaml").write_text(recipe.to_yaml())

    def no_room(reached: int) -> str:
        published(job, reached)
        raise NoRoomError("engine-0 has room on none of the nodes that are up")

    published(job, 0)
    monkeypatch.setattr(batch, "REQUEUED_S", 0)
    for ends in (lambda: no_room(0), lambda: "stopped", lambda: no_room(0), lambda: no_room(4), lambda: no_room(4)):
        attempt(monkeypatch, ends)
        run_job(job, allocation, Signals())
    assert allocation.orders == ["requeue"] * 4
    with pytest.raises(FatalError, match="requeued itself 1 times in a row"):
        run_job(job, allocation, Signals())


@pytest.mark.parametrize("restart", [0, 1], ids=["a first attempt", "a requeued one"])
def test_a_second_job_is_refused_while_one_is_at_work(
    job: BatchJob, monkeypatch: pytest.MonkeyPatch, restart: int
) -> None:
    """Also while what is at work is the attempt of a job that Slurm has started again."""

    def others_are_refused(supervisor: Supervisor) -> str:
        with pytest.raises(RunConflictError, match="being trained by another process"):
            run_job(job, Said("8", 0, "n2", 8), Signals())
        return "stopped"

    monkeypatch.setattr(Supervisor, "supervise", others_are_refused)
    assert run_job(job, Said("7", restart, "n1", 8), Signals()) == 0


def test_a_job_does_not_end_for_its_metrics(
    job: BatchJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """9400, for example, is taken on nodes that show what their GPUs do; and a node may have no address."""
    monkeypatch.setattr(Supervisor, "supervise", lambda _: "stopped")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        shown = dataclasses.replace(job, metrics_port=taken.getsockname()[1])
        assert run_job(shown, Said("7", 0, "localhost", 8, _last_known=["localhost"]), Signals()) == 0
        assert run_job(shown, Said("8", 0, "nowhere.invalid", 8), Signals()) == 0
    warnings = capsys.readouterr().err
    assert warnings.count("warning: metrics of the supervisor cannot be shown on") == 2


def test_the_key_is_the_users_alone_and_goes_at_the_end(job: BatchJob) -> None:
    with api_key(job, Allocation("7", 0, "n1", 8).name) as path:
        assert path.match(JOB_KEYS), "by which the sandbox of reward code hides it"
        assert (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
        first = path.read_text()
    assert not path.exists()
    with api_key(job, "slurm-7-1") as path:
        assert path.read_text() != first


def test_a_key_of_the_users_is_left_alone(job: BatchJob, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("key\n")
    given = BatchJob.parse([str(job.folder), "--gpus-per-node", "0", "--grace", "60", "--api-key-file", str(mine)])
    with api_key(given, "slurm-7-0") as path:
        assert path == mine
    assert mine.exists()


def test_roles_get_the_name_of_the_keys_file_and_not_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENKEEL_API_KEY", "a-key-that-nobody-may-see")
    environment = role_environment(Path("/keys/slurm-7-0.key"))
    assert environment["EVENKEEL_API_KEY_FILE"] == "/keys/slurm-7-0.key"
    assert "a-key-that-nobody-may-see" not in environment.values()


@pytest.mark.parametrize(
    ("unit", "words"),
    [
        (Unit("learner"), "role learner RUN 0 --recipe JOB/recipe.yaml --host 10.0.0.2 --nodes 4 --metrics-port 9401"),
        (
            Unit("learner", node=3),
            "role learner RUN 3 --recipe JOB/recipe.yaml --host 10.0.0.2 --nodes 4 --metrics-port 9401",
        ),
        (Unit("collector"), "role collector RUN --recipe JOB/recipe.yaml --host 10.0.0.2 --metrics-port 9402"),
        (Unit("router"), "role router RUN --recipe JOB/recipe.yaml --host 10.0.0.2 --metrics-port 9403"),
        (Unit("engine", 5), "role engine RUN 5 --recipe JOB/recipe.yaml --host 10.0.0.2 --metrics"),
    ],
)
def test_commands_of_the_roles(unit: Unit, words: str) -> None:
    options = ["--gpus-per-node", "8", "--grace", "9", "--python", "/venv/bin/python", "--metrics-port", "9400"]
    job = BatchJob.parse(["JOB", *options])
    shape = Shape.of(load_recipe(Path("qwen3_32b")), 8)
    command = role_program(job, RunDirectory(Path("/RUN")), shape, {"n2": "10.0.0.2"}.__getitem__)(unit, "n2")
    assert command == ["/venv/bin/python", "-P", "-m", "launch.cli", *words.replace("RUN", "/RUN").split()]


def test_the_batch_script_needs_no_torch_and_outside_of_slurm_says_so(tmp_path: Path, job: BatchJob) -> None:
    code = "import sys\nfor name in ('torch', 'sglang', 'megatron', 'transformers'): sys.modules[name] = None\n"
    code += f"sys.argv = ['batch', {str(job.folder)!r}, '--gpus-per-node', '0', '--grace', '60']\n"
    code += "from launch.schedulers.slurm.batch import main; main()"
    environment: dict[str, Any] = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 64
    assert done.stderr.startswith("error: SLURM_JOB_ID is not set, so this is no batch script of Slurm's")
    assert done.stderr.count("\n") == 1
