"""Does the run get on? Whichever process hangs, what it should leave in the run directory does not come."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from launch.run.waiting import Throttle
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.patience import Patience

LOOK_S = 5.0
FIRST_S = 120.0
"""Engines and learner start meanwhile."""


class RunProgress:
    """Says so, as an event, when a run leaves nothing new for longer than it used to."""

    def __init__(self, run: RunDirectory, event: Callable[..., None]) -> None:
        self._run, self._store = run, BatchStore(run.batches)
        logs = "the process that hangs; see the newest lines of RUN/logs"
        self._patience = Patience(partial(event, "no_progress"), "the run", logs, FIRST_S)
        self._due, self._seen = Throttle(LOOK_S), self._traces()

    def look(self) -> None:
        """Call it as often as you like."""
        if not self._due():
            return
        before, self._seen = self._seen, self._traces()
        if self._seen != before:
            self._patience.progress()
        self._patience.still("a batch, a step, a publish, an evaluation or a checkpoint")

    def _traces(self) -> tuple[int, ...]:
        run = self._run
        published = run.published_version() if run.is_published() else -1
        evaluated, saved = len(run.evaluated_versions()), max(run.saved_steps(), default=0)
        return self._store.next_index, run.trained_at_ns(), published, evaluated, saved
