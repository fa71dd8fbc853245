"""Run a role: wait for the recipe and for node 0, handle signals, and end with an exit status.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, TypeVar

from launch.run.addresses import LOOPBACK, own_address
from launch.run.metrics import METRICS_HOST_VARIABLE, METRICS_PORT_VARIABLE
from launch.run.processes import end_process, leave_fatal_note
from launch.run.restarts import count_start
from launch.run.waiting import FINISHED_POLL_S, RECIPE_DEADLINE_S, Stop, Throttle, grace_s, wait_for
from pipeline.config.loader import changed_keys, load_recipe
from pipeline.data.checksums import read_sealed_json, write_sealed_json
from pipeline.data.files import as_disk_full, make_folder
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
    LayoutError,
    PortInUseError,
    StoppedError,
    StoreError,
    SupersededError,
)
from pipeline.tasks.data import DIGEST_KEYS, with_digest

DATA_POLL_S = 10.0
"""Pause between looks at the data, since each reads all of it."""


def run_role(
    run: RunDirectory,
    name: str,
    body: Callable[[Stop], int | None],
    *,
    metrics_port: int | None = None,
    host: str = LOOPBACK,
) -> NoReturn:
    """Run a role and end this process with its exit status. The environment passes `metrics_port` on, to rank 0 too."""
    try:
        with as_disk_full(run.path):
            grace_s()  # raises for a bad value, which at SIGTERM would be too late
            count_start(run, name)
            stop = Stop().install()
            if metrics_port is not None:
                address = own_address(host, stop.check)
                os.environ |= {METRICS_PORT_VARIABLE: str(metrics_port), METRICS_HOST_VARIABLE: address}
            status = body(stop) or 0
    except EvenKeelError as error:
        status = status_of(error)
        print(f"{'error' if status in (1, FATAL_EXIT_CODE) else name}: {error}", file=sys.stderr, flush=True)
        if status == FATAL_EXIT_CODE:
            leave_fatal_note(run, name, error)
        if status == STOPPED_EXIT_CODE:
            count_start(run, name, back=True)
    end_process(status)


def status_of(error: EvenKeelError) -> int:
    """Return the exit status of a role for an error. A server that does not start may start on another host."""
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
    """Wait for the run's frozen recipe, which the learner's first host writes.

    With `given`, the learner's recipe, wait until the run has that recipe, whatever its data. A role with an older
    recipe would be superseded once the learner changes it, or would find a run finished that gets more steps.
    """
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
    """Wait as `wait_for_recipe`, and until the run has the data that is on this host, since the learner may be about to
    begin with other data. After the deadline, the task's builder reports the difference."""
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
    """Return whether the run still has the recipe, whatever its data. Claim the start first: a change of the recipe
    ends the starts that it finds."""
    newest = newest_recipe_file(run.path)
    return newest == frozen.path or changed_keys(run.recipe(), frozen.recipe).keys() <= DIGEST_KEYS


T = TypeVar("T")


@dataclass(frozen=True)
class Rendezvous:
    """The address of node 0 of a role on several hosts, in RUN/learner.json or RUN/engines/hosts-000003.json."""

    epoch: int
    """Epoch of the node 0 that wrote the file."""
    host: str
    port: int
    nodes: int
    version: int | None = None
    """Version of the weights that node 0 of an engine holds for all hosts; None for a learner."""

    def write(self, path: Path) -> None:
        make_folder(path.parent)
        write_sealed_json(path, vars(self))

    @classmethod
    def read(cls, path: Path) -> Rendezvous | None:
        """Read the file; None if it cannot be read now. Raises StoreError if it is damaged."""
        remedy = "remove it, and start node 0 again"
        try:
            return cls(**read_sealed_json(path, remedy, is_replaced=True))
        except OSError:
            return None
        except TypeError as error:
            raise StoreError(f"{path} is damaged ({error}); {remedy}") from error


def await_node_0(
    run: RunDirectory,
    path: Path,
    nodes: int,
    *,
    is_alive: Callable[[Rendezvous], bool],
    join: Callable[[Rendezvous], T | None],
    role: str,
    stop: Stop,
    deadline_s: float,
) -> T | Literal["finished"]:
    """Wait for a file at `path` by a node 0 that `is_alive`, and return what `join` makes of it.

    While `join` returns None, the file is read again. Returns "finished" once the run is finished. Raises LayoutError
    if node 0 names another number of `nodes` until the deadline, StoreError for a damaged file, and as `wait_for` does.
    """
    # Not at once: node 0 may be about to resume a finished run with more steps.
    look_for_end = Throttle(FINISHED_POLL_S, last=time.monotonic())
    other: list[int] = []
    """--nodes of the last file that did not fit. It may be of an earlier start, and the next file may fit."""

    def joined() -> T | Literal["finished"] | None:
        other.clear()
        if look_for_end() and run.is_finished():
            return "finished"
        found = Rendezvous.read(path)
        if found is None or not is_alive(found):
            return None
        if found.nodes != nodes:
            other.append(found.nodes)
            return None
        return join(found)

    try:
        return wait_for(stop, joined, f"node 0 of {role} (named in {path})", deadline_s)
    except DeadlineExceededError:
        if other:
            raise LayoutError(f"node 0 has --nodes {other[-1]}, this one {nodes}; give all the same number") from None
        raise
