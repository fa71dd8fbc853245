"""What the programs of all roles have in common: how they wait, are asked to end, and say how they ended.

0    the run is finished                       65   a later start of the role has taken over: not started again
64   fatal: the run has failed                 143  asked to end (SIGTERM) before that: started again, it goes on
anything else: start it again
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from launch.cluster.restarts import count_start, forget_start
from launch.cluster.roles.addresses import own_address
from launch.run.fatal_notes import leave_fatal_note
from pipeline.config.loader import changed_keys, load_recipe
from pipeline.config.recipe import Recipe
from pipeline.data.epochs import Epoch, epoch_folder, newest
from pipeline.data.files import full_disk_said
from pipeline.data.membership import Member
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
    RecipeError,
    StoppedError,
    StoreError,
    SupersededError,
)
from pipeline.patience import Patience, print_notice
from pipeline.tasks.digest import DIGEST_KEYS, with_digest

EPOCH_VARIABLE = "EVENKEEL_EPOCH"
"""Environment of a learner's ranks: the number of the learner's start that they belong to."""
GRACE_VARIABLE = "EVENKEEL_GRACE_S"
"""How long a role that was asked to end lets its ranks save, or its engine answer what is in flight."""
LOG_VARIABLE = "EVENKEEL_LOG"
"""The file that a role's output goes to, where a supervisor has started it; its children append to the same."""
METRICS_PORT_VARIABLE = "EVENKEEL_METRICS_PORT"
METRICS_HOST_VARIABLE = "EVENKEEL_METRICS_HOST"
DEFAULT_GRACE_S, LONGEST_GRACE_S = 120.0, 86_400.0
RECIPE_DEADLINE_S = 600.0
"""Longest wait for the learner to begin a run, whose own deadlines nobody knows yet."""
DATA_POLL_S = 10.0
"""All of the data is read at each look."""
POLL_S = 0.25
EPOCH_POLL_S = 2.0
FINISHED_POLL_S = 10.0
T = TypeVar("T")


class Stop:
    """Whether this process was asked to end. Installed, it is set by SIGTERM and by Ctrl-C."""

    def __init__(self) -> None:
        self.asked = False

    def install(self) -> Stop:
        """Take over the two signals."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)
        return self

    def check(self) -> None:
        """Raises StoppedError."""
        if self.asked:
            raise StoppedError("asked to end before the run was finished; started again, it goes on")

    def _ask(self, *_: object) -> None:
        self.asked = True


@dataclass
class Every:
    """True at most once in `every_s` seconds: what costs a look at a shared file system."""

    every_s: float
    _last: float = 0.0

    def __call__(self) -> bool:
        now = time.monotonic()
        due = now - self._last >= self.every_s
        if due:
            self._last = now
        return due


def finished_looks() -> Every:
    """When a host that waits for node 0 looks whether the run is finished: not at once, since node 0 may be about to go
    on with a recipe of more steps."""
    return Every(FINISHED_POLL_S, _last=time.monotonic())


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


def wait_for(stop: Stop, found: Callable[[], T | None], what: str, deadline_s: float) -> T:
    """What `found` returns once it is not None. Raises DeadlineExceededError, or StoppedError."""
    ends, told = time.monotonic() + deadline_s, False
    patience = Patience(print_notice, "this role", "the role that makes it (logs in RUN/logs)")
    while True:
        stop.check()
        if (result := found()) is not None:
            patience.progress()
            return result
        if time.monotonic() > ends:
            raise DeadlineExceededError(f"waited {deadline_s:g} s for {what}; see whether what should make it runs")
        if not told:
            print(f"waiting for {what}", flush=True)
            told = True
        patience.still(what)
        time.sleep(POLL_S)


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
    frozen, wanted, look = wait_for_recipe(run, stop, given), load_recipe(given), Every(DATA_POLL_S)

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


def wait_for_policy(run: RunDirectory, recipe: Recipe, stop: Stop) -> None:
    """Until a first policy is published, by the learner's first host."""
    deadline_s = recipe.rollout.start_deadline_s
    wait_for(stop, lambda: run.is_published() or None, f"a published policy in {run.policies}", deadline_s)


def wait_for_engines(run: RunDirectory, recipe: Recipe, stop: Stop, count: int) -> None:
    """Until `count` engines have announced themselves."""
    wait_for(
        stop,
        lambda: len(announced(run, recipe)) >= count or None,
        f"{count} of {recipe.rollout.engines} engines to announce themselves in {run.path}/engines",
        recipe.rollout.start_deadline_s,
    )


def announced(run: RunDirectory, recipe: Recipe) -> list[Member]:
    """Engines that are up as far as is known: announced by their newest start."""
    found = run.membership(recipe.rollout.urls).engines()
    if recipe.rollout.urls:
        return list(found)
    return [one for one in found if one.started == newest(epoch_folder(run.path, "engine", one.index))]


def rank_epoch(run: Path) -> Epoch:
    """The learner's start that this rank belongs to, as its agent has said. Raises StoreError without an agent."""
    number = os.environ.get(EPOCH_VARIABLE)
    if number is None:
        raise StoreError(
            f"{EPOCH_VARIABLE} is not set: this rank was not started by `evenkeel role learner`; start it by that"
        )
    return Epoch(epoch_folder(run, "learner"), int(number))


def grace_s() -> float:
    """Seconds of EVENKEEL_GRACE_S. Raises RecipeError for what is no time."""
    said = os.environ.get(GRACE_VARIABLE) or str(DEFAULT_GRACE_S)
    with suppress(ValueError):
        if 0 <= (seconds := float(said)) <= LONGEST_GRACE_S:
            return seconds
    raise RecipeError(f"{GRACE_VARIABLE} is {said!r}, expected seconds from 0 to {LONGEST_GRACE_S:g}; correct it")


def log_file() -> Path | None:
    """Where this role's output goes, if that is a file."""
    named = os.environ.get(LOG_VARIABLE)
    return Path(named) if named else None


def show_metrics(port: int | None, host: str, stop: Stop) -> None:
    """Say in the environment where this role's process, or the learner's rank 0, shows its metrics.

    Raises as `own_address` does, and StoppedError.
    """
    if port is not None:
        os.environ |= {METRICS_PORT_VARIABLE: str(port), METRICS_HOST_VARIABLE: own_address(host, stop.check)}
