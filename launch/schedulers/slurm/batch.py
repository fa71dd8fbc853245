"""Supervise one attempt of a run: the program in the batch script of `evenkeel launch slurm`.

    run finished                                    exit 0
    SIGUSR1: the time limit is near                 roles end in order, the job is submitted again, exit 0
    SIGTERM, or Slurm asked the roles to end        roles end in order, exit 0
    … because the job is preempted                  roles end in order, the job requeues itself
    too few nodes are up                            roles end, the job requeues itself; limited without progress
    Slurm has started the job again                 exit 65: this node was cut off, and the later attempt goes on
    fatal error                                     exit 64, with the reason

This process replaces the batch shell, so it receives Slurm's signals for the batch script.
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
"""Longest wait for Slurm to end this process after requeueing the job."""
REQUEUES = "requeues.json"
"""The file in the job's folder that counts requeues in a row without progress."""
OWN_S = 20
"""Seconds of the notice before the time limit that this program keeps; the roles get the rest, but at least half."""
NO_ROOM_S = 1800.0
"""Longest time spent asking Slurm to requeue a job with too few nodes: nothing else ends the job meanwhile."""
T = TypeVar("T")


@dataclass
class Signals:
    """Slurm's requests to this process."""

    end: bool = False
    time_limit: bool = False
    first_at: float | None = None
    """The time of the first signal, by time.monotonic."""

    def install(self) -> Signals:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self.note)
        return self

    def note(self, number: int, _: object = None) -> None:
        # Recorded first: the output may lie on a full disk.
        if number == signal.SIGUSR1:
            self.time_limit = True
        else:
            self.end = True
        self.first_at = time.monotonic() if self.first_at is None else self.first_at
        with suppress(OSError, RuntimeError):  # RuntimeError: the signal interrupted another print
            reason = "the time limit is near" if number == signal.SIGUSR1 else "asked to end"
            print(f"{reason}: ending in order", flush=True)

    def left_s(self, grace_s: float) -> float:
        """Return the seconds left of a notice of `grace_s`; without a signal, this program's part of the notice."""
        return OWN_S if self.first_at is None else max(0.0, self.first_at + grace_s - time.monotonic())


@dataclass(frozen=True)
class BatchJob:
    """The program's arguments, named like the options of `evenkeel launch slurm`."""

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
    """Yield the file with this attempt's API key: the user's, or a new one, which keeps an earlier attempt's roles, cut
    off but alive, away from this attempt's engines. Raises FatalError when no file can be written."""
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
    """Return the environment of the roles, which names the key's file and never holds the key."""
    environment = {name: value for name, value in child_environment().items() if name != API_KEY_VARIABLE}
    return {**environment, API_KEY_FILE_VARIABLE: str(key.absolute())}


def role_program(
    job: BatchJob, run: RunDirectory, shape: Shape, address_of: Callable[[str], str]
) -> Callable[[Unit, str], list[str]]:
    """Return a function that builds a unit's command on a node. The learner starts the run; other roles wait."""

    def command(unit: Unit, host: str) -> list[str]:
        options = ["--recipe", str(job.folder / RECIPE), "--host", address_of(host)]
        if unit.role == "learner":
            options += ["--nodes", str(shape.learner_nodes)]
        if unit.role == "engine" and shape.engine_nodes > 1:
            options += ["--nodes", str(shape.engine_nodes), "--node", str(unit.node)]
        options += metrics_options(unit, job.metrics_port)
        return [job.python, *role_command(run, unit, *options)[1:]]  # role_command starts with this node's interpreter

    return command


def attempt(job: BatchJob, allocation: Allocation, signals: Signals, key: Path) -> Outcome:
    """Supervise the roles until the run is `finished` or the roles were `stopped`. Raises NoRoomError, FatalError."""
    recipe = load_recipe(job.folder / RECIPE)
    run = RunDirectory(recipe.directory.absolute())
    logs = run.logs / allocation.name
    if run.is_finished():
        if nothing_left(run, recipe):
            return "finished"
        changes_to(run, with_digest(recipe, run))  # a refused change leaves the run finished
        reopen(run)  # otherwise this supervisor would end at once
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
    """Run one attempt, then requeue or resubmit as its outcome demands; return the batch script's exit status."""
    recipe = load_recipe(job.folder / RECIPE)  # loaded once: at the end the file system may not answer
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
    # Stopped by SIGTERM to the roles, or by the signal for the time limit. Half of the remaining notice is for this
    # question, the rest for submitting the next job.
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
    except OSError as error:  # the next job will tell
        print(f"warning: {os_error_line(error)}; the run is taken to have come further", file=sys.stderr, flush=True)
        moved = True
    if not moved:
        raise FatalError(
            "the time limit came before the run had sampled a batch, saved a checkpoint or published a version, so the "
            "job is not submitted again; raise --time"
        )
    # A submission that Slurm accepts without answering is repeated: the job that starts second is refused.
    following = answered(lambda: allocation.submit_next(job.folder / SCRIPT), signals.left_s(job.grace))
    print(f"submitted job {following}, which goes on", flush=True)
    return 0


def answered(order: Callable[[], T], within_s: float) -> T:
    """Return Slurm's answer, retrying for at most `within_s` while its controller may restart. Raises SlurmError."""
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
    """Raise FatalError after `run.max_restarts` requeues in a row without progress, as on faulty nodes."""
    path, now, most = job.folder / REQUEUES, progress(RunDirectory(recipe.directory)), recipe.run.max_restarts
    count = 0 if now != before else 1 + in_a_row(path, now)
    if count > most:
        path.unlink(missing_ok=True)  # resubmitting by hand starts the count again
        raise FatalError(
            f"{reason}; the job has requeued itself {most} times in a row without progress (run.max_restarts): see why "
            "nodes fail (`sinfo -R`), then submit it again"
        )
    note_in_a_row(path, now, count)


def requeue(allocation: Allocation, reason: str, within_s: float) -> int:
    """Requeue the job, trying for `within_s`, and wait for Slurm to end this process. Return 1 if it does not."""
    print(f"{reason}: the job requeues itself", flush=True)
    answered(allocation.requeue, within_s)
    time.sleep(REQUEUED_S)
    print(f"error: job {allocation.job} was requeued {REQUEUED_S} s ago, and still runs; submit it again", flush=True)
    return 1


def main() -> None:
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
