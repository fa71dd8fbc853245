"""Supervise the processes of one run: engines, router, learner and collector, wherever the starter starts them.

Any process may die at any time, even during its first start. The supervisor restarts it, after a pause that grows with
each death, and the process reads its work from the run directory. A file system outage of a few minutes ends nothing.
The run fails when a process keeps dying without progress of the run, when an engine ends twice in a row with the same
error, or when a role reports that a restart cannot help. A failing engine does not end the run while another engine
serves. The same command resumes a failed run.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from launch.run.live_view import LiveView
from launch.run.processes import FatalNotes
from launch.run.starter import Started, Unit
from launch.run.waiting import EPOCH_POLL_S, FINISHED_POLL_S, Outage, Throttle, announced, grace_s
from pipeline.background import Patience
from pipeline.child_process import ending, log_tail, remove_left_scratch
from pipeline.config.recipe import Recipe
from pipeline.data.epochs import Epoch, epoch_folder, newest
from pipeline.data.event_log import EventLog
from pipeline.data.files import changed_ns, remove_leftovers
from pipeline.data.run_directory import RunDirectory, numbered
from pipeline.data.store import BatchStore
from pipeline.errors import FATAL_EXIT_CODE, SUPERSEDED_EXIT_CODE, DiskFullError, FatalError, SupersededError
from rollout_sglang.server.start import ERROR_NAMED

POLL_S = 0.25
SERVERS_GRACE_S = 3.0
"""Time for servers to withdraw their announcements; no request is in flight when they are asked to end."""
SPARE_S = 10.0
"""Time beyond a unit's grace before it is killed."""
TOLD_S = 5.0
"""Seconds of waiting for a saving learner until the reason of the stop is printed."""
NO_LOG_PAUSE_S = 5.0
"""Pause before the next attempt to start a unit that a file system outage kept from starting."""
LONGEST_PAUSE_S = 30.0
"""Longest pause before a unit that keeps dying is restarted."""
Outcome = Literal["finished", "stopped"]


@dataclass
class RestartBudget:
    """A limit on the deaths of one process without progress of the run."""

    limit: int
    spent: int = 0
    progress: int = -1
    words: str = ""
    """Error of the last death, with its numbers replaced by 0."""
    pause_s: float = 0.0
    """Seconds until the next start: 0 after the first death, then 1, 2, 4, …"""

    def spend(self, name: str, progress: int, reason: str, words: str = "") -> None:
        """Count one death; progress of the run resets the count. Raises FatalError after too many deaths, or after two
        in a row with the same error, `words`, which a restart would not change."""
        before, self.words = self.words, re.sub(r"\d+", "0", words)
        self.spent = 1 if progress > self.progress else self.spent + 1
        self.progress = progress
        self.pause_s = 0.0 if self.spent < 2 else min(LONGEST_PAUSE_S, 2.0 ** min(self.spent - 2, 6))
        if words and self.spent > 1 and self.words == before:
            raise FatalError(
                f"{name} ended twice in the same way, so it is not started again: {reason}; correct what that names, "
                "and give the command again"
            )
        if self.spent > self.limit:
            raise FatalError(f"{name} died {self.spent} times without progress: {reason}")


@dataclass
class Supervisor:
    """The owner of a run's units, as a context manager."""

    run: RunDirectory
    recipe: Recipe
    view: LiveView
    event_log: EventLog
    start: Callable[[Unit, Path], Started]
    """Function that starts a unit and appends its output to the log; raises NoRoomError."""
    units: Sequence[Unit]
    epoch: Epoch
    stop_requested: Callable[[], bool] = lambda: False
    logs: Path | None = None
    """Folder of the units' logs; RUN/logs by default."""
    running: dict[Unit, Started] = field(default_factory=dict)
    ended: set[Unit] = field(default_factory=set)
    """Units that have finished, or that a start elsewhere has superseded."""
    elsewhere: bool = False
    """Whether a start elsewhere has superseded a unit."""
    due: dict[Unit, float] = field(default_factory=dict)
    """Dead unit → time of its next start (time.monotonic)."""
    came_up: set[int] = field(default_factory=set)
    """Indexes of the engines that have been up at least once."""
    budgets: dict[str, RestartBudget] = field(default_factory=dict)
    notes: FatalNotes = field(init=False)

    def __post_init__(self) -> None:
        self.notes = FatalNotes(self.run)
        self._finished_elsewhere = Throttle(FINISHED_POLL_S)
        self._superseded = Throttle(EPOCH_POLL_S)
        self._outage = Outage("the supervisor")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End all units. The learner saves first, except on a full disk, if superseded, or after a second Ctrl-C."""
        try:
            if not isinstance(error, DiskFullError | SupersededError | KeyboardInterrupt):
                self._stop(str(error) if isinstance(error, FatalError) else "")
        finally:
            self._end(list(self.running), SERVERS_GRACE_S)
        remove_left_scratch()  # scratch folders of killed roles
        if not self.elsewhere:  # all roles have ended, so that none needs its temporary files
            with suppress(SupersededError):
                for folder in self.run.shared_folders:
                    remove_leftovers(folder, self.epoch.check)

    def supervise(self) -> Outcome:
        """Run until the run is finished or asked to stop. Raises FatalError if it cannot be finished, and
        SupersededError if another supervisor has taken over."""
        for unit in self.units:
            self._start(unit)
        progress = RunProgress(self.run, self.event_log.event)
        # Learner and collector end by themselves when nothing is left to do.
        while any(unit.role in ("learner", "collector") for unit in [*self.running, *self.due]) or not (
            self._finished_elsewhere() and self._outage.tolerate(self.run.is_finished, False)
        ):
            if self._superseded():
                self._outage.tolerate(self.epoch.check, None)
            if self._outage.tolerate(self.stop_requested, False):
                self._stop()
                return "finished" if self._outage.tolerate(self.run.is_finished, False) else "stopped"
            if len(self.came_up) < self.recipe.rollout.engines:
                self.came_up |= self._outage.tolerate(
                    lambda: {member.index for member in announced(self.run, self.recipe)}, set()
                )
            for unit, started in list(self.running.items()):
                if (status := started.poll()) is not None:
                    self._take(unit, started, status)
            for unit in [unit for unit, at in self.due.items() if at <= time.monotonic()]:
                del self.due[unit]
                self._start(unit)
            self._outage.tolerate(progress.look, None)
            self._outage.tolerate(self.view.refresh, None)
            time.sleep(POLL_S)
        self._show()
        return "finished"

    def _start(self, unit: Unit) -> None:
        started = self._outage.tolerate(lambda: self.start(unit, self._log(unit)), None)
        if started is None:
            self.due[unit] = time.monotonic() + NO_LOG_PAUSE_S
            return
        self.running[unit] = started
        self._outage.tolerate(lambda: self.event_log.event("started", process=unit.name), None)

    def _log(self, unit: Unit) -> Path:
        """Return a new log path for the unit's next start, with the number of that start or a higher one."""
        folder = self.logs or self.run.logs
        there = (re.fullmatch(rf"{re.escape(unit.name)}-(\d+)\.log", path.name) for path in folder.glob("*.log"))
        numbers = [int(match[1]) for match in there if match]
        started = newest(epoch_folder(self.run.path, unit.role, unit.index))
        return folder / f"{unit.name}-{numbered(max([started, *numbers]) + 1)}.log"

    def _take(self, unit: Unit, started: Started, status: int) -> None:
        """Schedule a restart of a dead unit. Raises FatalError if that cannot help, or after too many deaths."""
        del self.running[unit]
        if status == 0 or status == SUPERSEDED_EXIT_CODE:
            self.ended.add(unit)
            self.elsewhere |= status == SUPERSEDED_EXIT_CODE
            return
        if not 0 < status < 128:
            reason = ending(status)
        else:
            reason = "(no log)" if started.log is None else log_tail(started.log).removeprefix("error: ")
        if status == FATAL_EXIT_CODE:
            raise self._outage.tolerate(self.notes.error, None) or FatalError(reason)
        # Other ends of an engine may not happen again: killed, silent, a port that is taken.
        words = reason if unit.role == "engine" and unit.node == 0 and ERROR_NAMED in reason else ""
        if unit.role == "engine" and unit.node == 0 and unit.index not in self.came_up:
            reason = f"it never came up; {reason}"
        named = started.log is None or str(started.log) in reason
        reason = reason if named else f"{reason}; its log is {started.log}"
        self._outage.tolerate(lambda: self.event_log.event("restarted", process=unit.name, reason=reason), None)
        budget = self.budgets.setdefault(unit.name, RestartBudget(self.recipe.run.max_restarts))
        store, run = BatchStore(self.run.batches), self.run
        progress = self._outage.tolerate(
            lambda: store.next_index + (run.published_version() if run.is_published() else 0), budget.progress
        )
        try:
            budget.spend(unit.name, progress, reason, words)
        except FatalError:
            if unit.role != "engine":
                raise
            up = self._outage.tolerate(lambda: announced(self.run, self.recipe), None)  # None during an outage
            others = {one.index for one in self.running if one.role == "engine" and one.index != unit.index}
            if up is not None and not any(member.index in others for member in up):
                raise
        self.due[unit] = time.monotonic() + budget.pause_s

    def _stop(self, reason: str = "") -> None:
        """End learner and collector before the engines: the learner may be publishing. Print `reason` after TOLD_S."""
        loops = [unit for unit in self.running if unit.role in ("learner", "collector")]
        self._end(loops, grace_s() + SPARE_S, reason)

    def _end(self, units: Sequence[Unit], grace_s: float, reason: str = "") -> None:
        """Terminate the units, and kill those that still run after `grace_s`."""
        started = [self.running.pop(unit) for unit in units]
        for one in started:
            if one.poll() is None:
                one.terminate()
        began = time.monotonic()
        try:
            while any(one.poll() is None for one in started) and time.monotonic() < began + grace_s:
                self._show()
                if reason and time.monotonic() > began + TOLD_S:
                    print(f"{reason}; waiting until the learner has saved", file=sys.stderr, flush=True)
                    reason = ""
                time.sleep(POLL_S)
        finally:
            for one in started:
                one.kill()

    def _show(self) -> None:
        with suppress(OSError):  # an outage does not end the wait for a learner that saves
            self.view.refresh()


LOOK_S = 5.0
FIRST_S = 120.0
"""Wait before the first notice, during which engines and learner start."""


class RunProgress:
    """A watch that records an event when a run makes no progress for longer than usual."""

    def __init__(self, run: RunDirectory, event: Callable[..., None]) -> None:
        self._run = run
        logs = "the process that hangs; see the newest lines of RUN/logs"
        self._patience = Patience(partial(event, "no_progress"), "the run", logs, FIRST_S)
        self._due, self._seen = Throttle(LOOK_S), self._traces()

    def look(self) -> None:
        if not self._due():
            return
        before, self._seen = self._seen, self._traces()
        if self._seen != before:
            self._patience.progress()
        self._patience.still("a batch, a step, a publish, an evaluation or a checkpoint")

    def _traces(self) -> tuple[int, ...]:
        run = self._run
        return *run.sampled_at_ns(), run.trained_at_ns(), changed_ns(run.published), changed_ns(run.checkpoints)
