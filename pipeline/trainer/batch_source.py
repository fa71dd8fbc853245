"""The batches that all ranks train on: rank 0 waits for each, looks whether to stop, and tells the others.

rank 0   lists the batches every second ──"not yet" every few seconds, then "there"──▶ every rank opens the file
                    ▲                                                                        │ reads what is counted in
               stop requested? superseded? ── what ends the wait ends it on every rank       │ samples, deals it out,
                                                                                             ▼ reads its own tokens
numbers of response tokens (9 bytes each) of all samples ◀──exchanged, bit for bit────── its share
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.background import ANSWER_S
from pipeline.data.batch import Batch, LogprobContract, Share
from pipeline.data.files import FIRST_POLL_S, VISIBLE_S, fsync_directory, slower
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import DeadlineExceededError, StoppedError
from pipeline.patience import Patience, Say, print_notice
from pipeline.ports.learner import Learner

STOP_FILE_VARIABLE = "EVENKEEL_STOP_FILE"
"""Names a local file: once it is there, training ends in order."""

Answer = Literal["there", "lost", "not yet", "stop"]


def stop_file_exists() -> bool:
    """Whether the process that started this one has asked it to end."""
    name = os.environ.get(STOP_FILE_VARIABLE)
    return name is not None and Path(name).exists()


def waiting_for_batches(say: Say) -> Patience:
    """What says so when a batch does not come for long."""
    return Patience(say, "the learner", "the collector's commit (its log is in RUN/logs)")


def _all_together(batch: Batch) -> list[NDArray[np.bool_]]:
    return [np.ones(batch.num_samples, np.bool_)]


@dataclass(frozen=True, kw_only=True)
class BatchSource:
    """The committed batches of `store`, for the learner of `run`. Every method is collective."""

    run: RunDirectory
    store: BatchStore
    learner: Learner
    contract: LogprobContract
    wait_deadline_s: float
    """Longest wait for a batch while the collector commits and evaluates nothing."""
    together: Callable[[Batch], Sequence[NDArray[np.bool_]]] = _all_together
    """Masks [samples] of what is run through the model together, from what is counted in samples
    (pipeline.trainer.mini_batches.dealt_together): each is dealt out evenly over the ranks."""
    stop_requested: Callable[[], bool] = stop_file_exists
    """Asked on rank 0 alone."""
    visible_s: float = VISIBLE_S
    patience: Patience = field(default_factory=lambda: waiting_for_batches(print_notice))
    """Of rank 0."""

    def is_there(self, index: int) -> bool:
        """Whether `wait` for the batch would return at once."""
        return self.learner.tell(lambda: index in self.store.settled())

    def wait(self, index: int, meanwhile: Callable[[], None] = lambda: None) -> Batch | None:
        """Batch `index`, once it is committed; None when it was lost by damage. A rank of several holds its share.
        While it is not there, `meanwhile` is called every few seconds, on every rank.

        Raises on every rank StoppedError when the process was asked to end, DeadlineExceededError, SupersededError, and
        what BatchStore.read raises on any.
        """
        watch = _Watch(self, index)
        while (answer := self.learner.tell(watch.look)) == "not yet":
            meanwhile()
        if answer == "stop":
            raise StoppedError(f"asked to end before batch {index}; start the run again to go on")
        if answer == "lost":
            return None
        found: list[Batch] = []
        choose = self._share if self.learner.num_data_ranks > 1 else None
        self.learner.everywhere(
            lambda: found.append(self.store.read(index, self.contract, visible_s=self.visible_s, choose=choose))
        )
        # Effective sample size, quantiles and denominators are made of the numbers of all response tokens.
        return found[0] if choose is None else found[0].with_numbers(self.learner.sum_of_shares)

    def _share(self, batch: Batch) -> Share:
        return self.learner.share(batch.lengths, self.together(batch))


class _Watch:
    """Rank 0's view of one wait; the other ranks make one too, and look at nothing."""

    def __init__(self, source: BatchSource, index: int) -> None:
        self._source = source
        self._index = index
        self._pause_s = FIRST_POLL_S
        self._seen: tuple[int, int] | None = None
        self._deadline = time.monotonic() + source.wait_deadline_s

    def look(self) -> Answer:
        """Look for some seconds. Raises DeadlineExceededError once the collector has stood still for too long."""
        source, ends = self._source, time.monotonic() + ANSWER_S
        source.run.fence()
        self._seen = self._seen or self._progress()
        while True:
            if source.stop_requested():
                return "stop"
            if self._index in source.store.settled():
                # Whoever made it may not have come to that: what is trained on must not be gone after a power cut.
                fsync_directory(source.store.directory)
                source.patience.progress()
                return "there" if source.store.lost(self._index) is None else "lost"
            source.patience.still(f"batch {self._index}")
            self._judge()
            if time.monotonic() >= ends:
                return "not yet"
            time.sleep(self._pause_s)
            self._pause_s = slower(self._pause_s)

    def _judge(self) -> None:
        if time.monotonic() < self._deadline:
            return
        before, self._seen = self._seen, self._progress()
        if self._seen == before:
            raise DeadlineExceededError(
                f"waited {self._source.wait_deadline_s:g} s for batch {self._index} in {self._source.store.directory}, "
                "and none was committed nor a version evaluated; look at the collector's log"
            )
        self._deadline = time.monotonic() + self._source.wait_deadline_s

    def _progress(self) -> tuple[int, int]:
        """Changes while the collector gets on: it commits, and it evaluates before it commits."""
        return len(self._source.store.committed()), len(self._source.run.evaluated_versions())
