"""Make the models and run the cells: ordinary `evenkeel` commands, some at a time, each resumable by itself.

A finished or diverged cell is left alone; an unfinished or failed one goes on. A cell whose declaration no longer gives
the recipe in its directory is refused before anything starts: the page must not mix two recipes under one name.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.child_process import ChildProcess, log_tail
from pipeline.config.loader import changed_keys
from pipeline.data.files import write_atomically
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import DeadlineExceededError, FatalError, RunConflictError
from tests.evidence.matrix import (
    REPOSITORY,
    Cell,
    Experiment,
    Matrix,
    Model,
    Overrides,
    as_overrides,
    model_folder,
)
from tests.evidence.results import SETTLED, state_of

POLL_S = 0.5
CELL_DEADLINE_S = 4 * 3600.0
MODEL_DEADLINE_S = 3600.0
_OPTIMIZER = "learner.optimizer"

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command, its log, and where it may be looked up."""

    name: str
    arguments: tuple[str, ...]
    log: Path
    deadline_s: float

    def start(self) -> ChildProcess:
        """The command dies with this process; what it did stays."""
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
        command = [sys.executable, "-m", "launch.cli", *self.arguments]
        return ChildProcess(command, self.log, environment)


def train_job(cell: Cell) -> Job:
    """The cell as a command."""
    sets = [part for override in cell.overrides for part in ("--set", override)]
    return Job(
        name=cell.name,
        arguments=("train", str(cell.recipe), *sets),
        log=cell.root / "logs" / f"{cell.name}.log",
        deadline_s=CELL_DEADLINE_S,
    )


def check_unchanged(cells: Sequence[Cell]) -> None:
    """Raises RunConflictError naming the first cell whose directory holds another recipe, and RecipeError for a cell
    that is no recipe."""
    for cell in cells:
        recipe = cell.resolved()
        if not (cell.directory / "recipe.yaml").exists():
            continue
        changed = changed_keys(RunDirectory(cell.directory).recipe(), recipe)
        if difference := [f"{key}: {change}" for key, change in changed.items()]:
            raise RunConflictError(
                f"{cell.directory} was run with another recipe ({'; '.join(difference)}); "
                "give the changed cell another name in the matrix, or move that directory away"
            )


def is_settled(cell: Cell) -> bool:
    """Whether running it again would tell nothing new."""
    return state_of(cell.directory)[0] in SETTLED


def make_model(model: Model, name: str, root: Path, say: Say) -> None:
    """Random weights, then the warm-up; nothing when it is there already. Raises RunConflictError when what is there
    was made otherwise, FatalError when making it fails."""
    out, base, made_by = model_folder(root, name), model_folder(root, "base"), root / "models" / f"{name}.json"
    declared = json.dumps(model.model_dump(mode="json"), sort_keys=True)
    if made_by.exists() and made_by.read_text() != declared:
        raise RunConflictError(
            f"{out} was warmed up with other settings ({made_by} has them); "
            "give the changed model another name in the matrix, or move both away"
        )
    if not base.exists():
        _finish(Job(name="base", arguments=("model", "new", str(base)), log=root / "logs" / "base.log", deadline_s=300))
    if out.exists():
        return
    write_atomically(made_by, declared)
    settings = _for_warm_up(model.set)
    values = {"run.name": name, "run.root": str(root / "warm-up"), "model.path": str(base), **settings}
    sets = [part for override in as_overrides(values) for part in ("--set", override)]
    numbers = ("--steps", str(model.steps), "--batch-size", str(model.batch_size))
    say(f"warming up {name}: {model.steps} steps")
    arguments = ("sft", str(REPOSITORY / model.recipe), "--out", str(out), *numbers, *sets)
    _finish(Job(name=name, arguments=arguments, log=root / "logs" / f"{name}.log", deadline_s=MODEL_DEADLINE_S))


def _for_warm_up(settings: Overrides) -> Overrides:
    """What a model's cells are given, without their learning rate: the warm-up keeps that of `evenkeel sft`."""
    whole = {key: value for key, value in settings.items() if key != f"{_OPTIMIZER}.lr"}
    if isinstance(optimizer := whole.get(_OPTIMIZER), dict):
        whole[_OPTIMIZER] = {key: value for key, value in optimizer.items() if key != "lr"}
    return whole


def _finish(job: Job) -> None:
    failures = run_jobs([job], at_once=1, say=lambda _: None)
    if failures:
        raise FatalError(f"{job.name} failed: {failures[job.name]}; see {job.log}")


def run_jobs(jobs: Sequence[Job], *, at_once: int, say: Say) -> dict[str, str]:
    """Run all to their end, `at_once` of them beside one another; the reason of each that failed, by name."""
    waiting, running = deque(jobs), dict[str, tuple[Job, ChildProcess, float]]()
    failures: dict[str, str] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.popleft()
                running[job.name] = job, job.start(), time.monotonic()
            for job, process, started in list(running.values()):
                seconds = time.monotonic() - started
                if process.poll() is None and seconds > job.deadline_s:
                    process.stop()
                    raise DeadlineExceededError(f"{job.name} took longer than {job.deadline_s:.0f} s; see {job.log}")
                if process.poll() is not None:
                    del running[job.name]
                    if process.poll() != 0:
                        failures[job.name] = log_tail(job.log, lines=1)
                    outcome = "ended with an error" if job.name in failures else "done"
                    say(f"{job.name}: {outcome} after {seconds:.0f} s, {len(waiting) + len(running)} left")
            time.sleep(POLL_S)
    finally:
        for _, process, _ in running.values():
            process.stop()
    return failures


def run_cells(matrix: Matrix, experiment: Experiment, cells: Sequence[Cell], jobs: int) -> bool:
    """Run what is not settled; whether anything failed otherwise than by diverging."""
    waiting = [cell for cell in cells if not is_settled(cell)]
    if not waiting:
        return False
    make_model(matrix.models[experiment.model], experiment.model, waiting[0].root, say)
    say(f"{experiment.title}: {len(waiting)} cells to run")
    failures = run_jobs([train_job(cell) for cell in waiting], at_once=1 if experiment.alone else jobs, say=say)
    for cell in waiting:
        if cell.name in failures and not is_settled(cell):
            say(f"{cell.name} failed: {failures[cell.name]}")
    return any(cell.name in failures and not is_settled(cell) for cell in waiting)


def say(line: str) -> None:
    """Progress, with the clock."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
