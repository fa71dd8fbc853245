"""What the programs of all roles have in common: how they wait, are asked to end, and say how they ended.

0    the run is finished                       65   a later start of the role has taken over: not started again
64   fatal: the run has failed                 143  asked to end (SIGTERM) before that: started again, it goes on
anything else: start it again
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from launch.run.addresses import own_address
from launch.run.metrics import METRICS_HOST_VARIABLE, METRICS_PORT_VARIABLE
from launch.run.processes import leave_fatal_note
from launch.run.restarts import count_start, forget_start
from launch.run.waiting import FINISHED_POLL_S, RECIPE_DEADLINE_S, Stop, Throttle, grace_s, wait_for
from pipeline.config.loader import changed_keys, load_recipe
from pipeline.data.files import full_disk_said
from pipeline.data.run_directory import RunDirectory
from pipeline.data.run_recipes import RecipeInForce, newest_recipe_file, recipe_file, recipe_in_force
from pipeline.errors import (
    FATAL_EXIT_CODE,
    STOPPED_EXIT_CODE,
    SUPERSEDED_EXIT_CODE,
    DeadlineExceededError,
    EngineStartError,
    EvenKeelError,
    FatalError,
    PortInUseError,
    StoppedError,
    SupersededError,
)
from pipeline.tasks.data import DIGEST_KEYS, with_digest

DATA_POLL_S = 10.0
"""All of the data is read at each look."""


def finished_looks() -> Throttle:
    """When a host that waits for node 0 looks whether the run is finished: not at once, since node 0 may be about to go
    on with a recipe of more steps."""
    return Throttle(FINISHED_POLL_S, last=time.monotonic())


def run_role(run: RunDirectory, name: str, body: Callable[[Stop], int | None]) -> NoReturn:
    """Run a role to its end, and end this process with the exit status that says how it went."""
    try:
        with full_disk_said(run.path):
            grace_s()  # at SIGTERM it would be too late to refuse it
            count_start(run, name)
            status = body(Stop().install()) or 0
    except EvenKeelError as error:
        status = status_of(error)
        print(f"{'error' if status in (1, FATAL_EXIT_CODE) else name}: {error}", file=sys.stderr, flush=True)
        if status == FATAL_EXIT_CODE:
            leave_fatal_note(run, name, error)
        if status == STOPPED_EXIT_CODE:
            forget_start(run, name)
    end_process(status)


def end_process(status: int) -> NoReturn:
    """Helper threads and process groups must not keep a role alive that has ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def status_of(error: EvenKeelError) -> int:
    """The exit status of a role that met the error. A server that does not come up may do so on another host."""
    match error:
        case SupersededError():
            return SUPERSEDED_EXIT_CODE
        case StoppedError():
            return STOPPED_EXIT_CODE
        case EngineStartError() | PortInUseError():
            return 1
        case FatalError():
            return FATAL_EXIT_CODE
        case _:
            return 1


def wait_for_recipe(run: RunDirectory, stop: Stop, given: Path | None = None) -> RecipeInForce:
    """The run's frozen recipe, which the learner's first host writes. With the recipe that the learner is `given`: once
    the run goes by that one, whatever its data. Who began with an older one would be superseded as soon as the learner
    changes it, or find a run finished that gets more steps."""
    if given is None:
        wait_for(stop, lambda: recipe_file(run.path).is_file() or None, str(recipe_file(run.path)), RECIPE_DEADLINE_S)
        return recipe_in_force(run.path)
    wanted, others = load_recipe(given), set[Path]()

    def found() -> RecipeInForce | None:
        if not recipe_file(run.path).is_file() or newest_recipe_file(run.path) in others:
            return None
        newest = recipe_in_force(run.path)
        if changed_keys(newest.recipe, wanted).keys() <= DIGEST_KEYS:
            return newest
        others.add(newest.path)
        return None

    return wait_for(stop, found, f"{run.path} to go by {given}", RECIPE_DEADLINE_S)


def wait_for_data(run: RunDirectory, stop: Stop, given: Path) -> RecipeInForce:
    """`wait_for_recipe`, for who reads the data: until the run goes by what is there, since the learner may be about to
    begin with other data. At the deadline whoever builds the task says what differs."""
    frozen, wanted, look = wait_for_recipe(run, stop, given), load_recipe(given), Throttle(DATA_POLL_S)

    def found() -> RecipeInForce | None:
        if not look():
            return None
        newest = recipe_in_force(run.path)
        return None if changed_keys(newest.recipe, with_digest(wanted, run)) else newest

    with suppress(DeadlineExceededError):
        return wait_for(stop, found, f"{run.path} to go by the data of {given} on this host", RECIPE_DEADLINE_S)
    return frozen


def is_in_force(run: RunDirectory, frozen: RecipeInForce) -> bool:
    """Whether the run still goes by the recipe, whatever its data. To be asked after the start is claimed, since one
    that changes the recipe ends those that it finds."""
    newest = newest_recipe_file(run.path)
    return newest == frozen.path or changed_keys(run.recipe(), frozen.recipe).keys() <= DIGEST_KEYS


def show_metrics(port: int | None, host: str, stop: Stop) -> None:
    """Say in the environment where this role's process, or the learner's rank 0, shows its metrics.

    Raises as `own_address` does, and StoppedError.
    """
    if port is not None:
        os.environ |= {METRICS_PORT_VARIABLE: str(port), METRICS_HOST_VARIABLE: own_address(host, stop.check)}
