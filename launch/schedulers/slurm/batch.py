"""Supervise one attempt of a run: the program in the batch script of `evenkeel launch slurm`.

    run finished                                  exit 0
    SIGUSR1, the time limit is near               roles end in order, the job is submitted again, exit 0
    SIGTERM, or roles that Slurm asked to end     roles end in order, exit 0
    … because the job is preempted                roles end in order, the job requeues itself
    too few nodes are up                          roles are ended, the job requeues itself, so often without progress
    Slurm has started the job again               exit 65; this node was cut off, and the other attempt goes on
    fatal                                         exit 64, with the reason

The batch shell has become this process, so that signals of Slurm's for the batch script reach it.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from launch.build.api_key import API_KEY_FILE_VARIABLE, API_KEY_VARIABLE
from launch.exit_codes import os_error_line
from launch.run.claim import claimed
from launch.run.live_view import LiveView
from launch.run.metrics import observers_of, shown_metrics
from launch.run.processes import child_environment
from launch.run.restarts import in_a_row, note_in_a_row, progress
from launch.run.starter import NoRoomError, Unit, metrics_options, role_command
from launch.run.supervisor import Outcome, Supervisor
from launch.run.waiting import GRACE_VARIABLE
from launch.schedulers.slurm.placement import Shape
from launch.schedulers.slurm.render import RECIPE, SCRIPT
from launch.schedulers.slurm.srun import ASK_PAUSE_S, Allocation, Guard, Images, SlurmError, SrunStarter
from pipeline.analysis.report import write_last_report
from pipeline.child_process import append_working_folder_to_path
from pipeline.config.loader import load_recipe
from pipeline.config.recipe import Recipe
from pipeline.data.event_log import EventLog
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import (
    FATAL_EXIT_CODE,
    SUPERSEDED_EXIT_CODE,
    EvenKeelError,
    FatalError,
    SupersededError,
)
from pipeline.resume import changes_to, nothing_left, reopen
from pipeline.tasks.data import with_digest

REQUEUED_S = 120
"""Longest wait for Slurm to end this process after it was told to requeue the job."""
REQUEUES = "requeues.json"
"""In the job's folder: how often it has requeued itself in a row without progress."""
OWN_S = 20
"""Of the notice before the time limit, what this program keeps for itself; the roles get the rest, or half."""
NO_ROOM_S = 1800.0
"""Longest time in which Slurm's controller is asked to requeue a job that too few nodes are left of: nothing ends it
meanwhile."""
T = TypeVar("T")


@dataclass
class Signals:
    """What Slurm has asked this process to do."""

    end: bool = False
    time_limit: bool = False
    first_at: float | None = None
    """When the first of them came, by time.monotonic."""

    def install(self) -> Signals:
        """Take over SIGUSR1 and SIGTERM."""
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self.note)
        return self

    def note(self, number: int, _: object = None) -> None:
        """Note a signal, and say so."""
        # Noted first: the output may lie on a disk that is full.
        if number == signal.SIGUSR1:
            self.time_limit = True
        else:
            self.end = True
        self.first_at = time.monotonic() if self.first_at is None else self.first_at
        with suppress(OSError, RuntimeError):  # RuntimeError: the signal came amid another print
            reason = "the time limit is near" if number == signal.SIGUSR1 else "asked to end"
            print(f"{reason}: ending in order", flush=True)

    def left_s(self, grace_s: float) -> float:
        """Return what is left of a notice of `grace_s`; what this program keeps of it where only the roles had it."""
        return OWN_S if self.first_at is None else max(0.0, self.first_at + grace_s - time.monotonic())


@dataclass(frozen=True)
class BatchJob:
    """What the rendering says to the batch script, under the names of its options."""

    folder: Path
    gpus_per_node: int
    learner_nodes: int | None
    grace: int
    python: str
    key_dir: Path
    api_key_file: Path | None
    container_image: str | None
    rollout_image: str | None
    container_mounts: str | None
    metrics_port: int | None
    resubmit: bool

    @staticmethod
    def parse(arguments: Sequence[str]) -> BatchJob:
        parser = argparse.ArgumentParser(prog="python -m launch.schedulers.slurm.batch")
        parser.add_argument("folder", type=Path)
        parser.add_argument("--gpus-per-node", type=int, required=True)
        parser.add_argument("--learner-nodes", type=int)
        parser.add_argument("--grace", type=int, required=True)
        parser.add_argument("--python", default=sys.executable)
        parser.add_argument("--key-dir", type=Path, default=Path("~/.evenkeel"))
        parser.add_argument("--api-key-file", type=Path)
        for name in ("container-image", "rollout-image", "container-mounts"):
            parser.add_argument(f"--{name}")
        parser.add_argument("--metrics-port", type=int)
        parser.add_argument("--no-resubmit", dest="resubmit", action="store_false")
        return BatchJob(**vars(parser.parse_args(arguments)))


@contextmanager
def api_key(job: BatchJob, name: str) -> Iterator[Path]:
    """Give the file with the API key of this attempt: the user's own, or a new one for this user alone, removed at the
    end.

    A role that was cut off in an earlier attempt has another key, so that no engine of this one listens to it. Raises
    FatalError where no file can be written.
    """
    if job.api_key_file is not None:
        yield job.api_key_file.expanduser()
        return
    path = job.key_dir.expanduser() / f"{name}.key"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(24) + "\n")
    except OSError as error:
        raise FatalError(f"no API key could be written: {os_error_line(error)}; see --key-dir") from error
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def role_environment(key: Path) -> dict[str, str]:
    """Make the environment of the roles: it names the file with the key, and never holds the key."""
    environment = {name: value for name, value in child_environment().items() if name != API_KEY_VARIABLE}
    return {**environment, API_KEY_FILE_VARIABLE: str(key.absolute())}


def role_program(
    job: BatchJob, run: RunDirectory, shape: Shape, address_of: Callable[[str], str]
) -> Callable[[Unit, str], list[str]]:
    """Make the command of a unit on a node. The learner begins the run with the rendered recipe, for which others
    wait."""

    def command(unit: Unit, host: str) -> list[str]:
        options = ["--recipe", str(job.folder / RECIPE), "--host", address_of(host)]
        if unit.role == "learner":
            options += ["--nodes", str(shape.learner_nodes)]
        if unit.role == "engine" and shape.engine_nodes > 1:
            options += ["--nodes", str(shape.engine_nodes), "--node", str(unit.node)]
        options += metrics_options(unit, job.metrics_port)
        return [job.python, *role_command(run, unit, *options)[1:]]  # that interpreter is this node's

    return command


def attempt(job: BatchJob, allocation: Allocation, signals: Signals, key: Path) -> Outcome:
    """Supervise the roles until the run is `finished`, or until they were `stopped`. Raises NoRoomError, FatalError."""
    recipe = load_recipe(job.folder / RECIPE)
    run = RunDirectory(recipe.directory.absolute())
    logs = run.logs / allocation.name
    if run.is_finished():
        if nothing_left(run, recipe):
            return "finished"
        changes_to(run, with_digest(recipe, run))  # what is refused leaves the run finished
        reopen(run)  # this supervisor would end
    shape = Shape.of(recipe, job.gpus_per_node, job.learner_nodes)
    images = Images(job.container_image, job.rollout_image or job.container_image, job.container_mounts)
    program = role_program(job, run, shape, allocation.address)
    starter = SrunStarter(allocation, shape, program, role_environment(key), images)
    guard = Guard(allocation, logs / "guard.log")

    def asked() -> bool:
        guard.keep()
        return signals.end or signals.time_limit or starter.asked_from_outside()

    # The node of an earlier attempt may be cut off, and its supervisor still alive there.
    with claimed(run, takes_over=allocation.restart > 0) as epoch:
        metrics = None
        if job.metrics_port is not None:
            metrics = shown_metrics("supervisor", run.path, job.metrics_port, allocation.address(allocation.batch_host))
        event_log = EventLog(run.path, epoch.name, observers_of(metrics))
        try:
            with (
                LiveView.of_run(run.path, recipe) as view,
                Supervisor(
                    run, recipe, view, event_log, starter.start, shape.units(), epoch, asked, logs
                ) as supervisor,
            ):
                outcome = supervisor.supervise()
        finally:
            guard.stop()
        if outcome == "finished":
            event_log.event("finished", steps=recipe.run.steps)
            if report := write_last_report(run.path):
                print(f"report: {report}", flush=True)
    return outcome


def run_job(job: BatchJob, allocation: Allocation, signals: Signals) -> int:
    """Run one attempt, and what follows from how it ended; returns the exit status of the batch script."""
    recipe = load_recipe(job.folder / RECIPE)  # once: at the end the file system may not answer
    before = progress(RunDirectory(recipe.directory))
    try:
        with api_key(job, allocation.name) as key:
            outcome = attempt(job, allocation, signals, key)
    except NoRoomError as error:
        count_requeue(job, recipe, before, str(error))
        return requeue(allocation, str(error), NO_ROOM_S)
    print(f"{allocation.name}: {outcome}", flush=True)
    with suppress(OSError):  # a file system that does not answer
        (job.folder / REQUEUES).unlink(missing_ok=True)
    if outcome == "finished":
        return 0
    # By SIGTERM to the roles, or by the signal for the time limit. Half of what is left of the notice is for asking,
    # the rest for submitting the next job where Slurm does not say.
    try:
        preempted = answered(allocation.is_preempted, signals.left_s(job.grace) / 2)
    except SlurmError as error:
        print(f"warning: {error}; the job is taken not to be preempted", file=sys.stderr, flush=True)
        preempted = False
    if preempted:
        return requeue(allocation, "Slurm preempts the job", signals.left_s(job.grace))
    if not signals.time_limit or not job.resubmit:
        return 0
    try:
        moved = progress(RunDirectory(recipe.directory)) != before
    except OSError as error:  # the next job finds out
        print(f"warning: {os_error_line(error)}; the run is taken to have come further", file=sys.stderr, flush=True)
        moved = True
    if not moved:
        raise FatalError(
            "the time limit came before the run had sampled a batch, saved a checkpoint or published a version, so the "
            "job is not submitted again; raise --time"
        )
    # One that Slurm took without saying so is submitted twice: whichever is started second is refused.
    following = answered(lambda: allocation.submit_next(job.folder / SCRIPT), signals.left_s(job.grace))
    print(f"submitted job {following}, which goes on", flush=True)
    return 0


def answered(order: Callable[[], T], within_s: float) -> T:
    """Return what Slurm answers. Its controller may be away for a moment, for a restart: it is asked again, for
    `within_s` at most. Raises SlurmError."""
    ends = time.monotonic() + within_s
    while True:
        try:
            return order()
        except SlurmError as error:
            if time.monotonic() + ASK_PAUSE_S > ends:
                raise
            print(f"warning: {error}; it is asked again", file=sys.stderr, flush=True)
        time.sleep(ASK_PAUSE_S)


def count_requeue(job: BatchJob, recipe: Recipe, before: tuple[int, ...], reason: str) -> None:
    """Raise FatalError once the job has requeued itself `run.max_restarts` times in a row without progress: nodes that
    fail whatever is started there would come back with every attempt."""
    path, now, most = job.folder / REQUEUES, progress(RunDirectory(recipe.directory)), recipe.run.max_restarts
    count = 0 if now != before else 1 + in_a_row(path, now)
    if count > most:
        path.unlink(missing_ok=True)  # who submits it again has seen to it
        raise FatalError(
            f"{reason}; the job has requeued itself {most} times in a row without progress (run.max_restarts): see why "
            "nodes fail (`sinfo -R`), then submit it again"
        )
    note_in_a_row(path, now, count)


def requeue(allocation: Allocation, reason: str, within_s: float) -> int:
    """Queue the job again, for other nodes or another time; Slurm ends this process meanwhile. It is asked for
    `within_s`."""
    print(f"{reason}: the job requeues itself", flush=True)
    answered(allocation.requeue, within_s)
    time.sleep(REQUEUED_S)
    print(f"error: job {allocation.job} was requeued {REQUEUED_S} s ago, and still runs; submit it again", flush=True)
    return 1


def main() -> None:
    """Run the batch script."""
    append_working_folder_to_path()
    signals = Signals().install()
    job = BatchJob.parse(sys.argv[1:])
    os.environ[GRACE_VARIABLE] = str(max(job.grace - OWN_S, job.grace // 2))
    try:
        status = run_job(job, Allocation.of(os.environ), signals)
    except SupersededError as error:
        print(f"superseded: {error}", file=sys.stderr, flush=True)
        status = SUPERSEDED_EXIT_CODE
    except FatalError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        status = FATAL_EXIT_CODE
    except (EvenKeelError, OSError) as error:
        said = os_error_line(error) if isinstance(error, OSError) else error
        print(f"error: {said}; submit the job again", file=sys.stderr, flush=True)
        status = 1
    sys.exit(status)


if __name__ == "__main__":
    main()
