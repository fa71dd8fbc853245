"""pi_old: the learner's own log-probabilities of a batch, at weights that stay the same for several optimizer steps.

staged                            the weights with which the stage began. All batches of a stage are scored before
                                  its first step, and kept in the run directory: a learner that is started again in
                                  the middle of a stage has other weights by then
sync, async; several updates      the weights before the batch's first update. The batch is scored as a whole, as
                                  trainers with mini-batches do
sync, async; one update a batch   the weights before the step, which is what scoring the step yields anyway
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.data.records import Batch, LogprobContract
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import StoreError
from pipeline.ports.learner import Learner
from pipeline.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class OldLogprobs:
    """For objectives and corrections that divide by pi_old."""

    run: RunDirectory
    store: BatchStore
    learner: Learner
    schedule: Schedule
    updates_per_batch: int
    contract: LogprobContract
    wait_deadline_s: float

    def of(self, batch: Batch) -> NDArray[np.float32] | None:
        """[responses], None where they are those of the scored step. Collective; called before the first update.

        The first batch of a stage waits for all batches of the stage, and scores them. Raises StoreError when those of
        a stage that is under way are missing.
        """
        if self.schedule.kind != "staged":
            return self.learner.logprobs(batch) if self.updates_per_batch > 1 else None
        step = batch.index
        if step == self.schedule.required_version(step):
            self._score_stage(step)
        kept = self.run.old_logprobs(step)
        if kept is None:
            raise StoreError(
                f"{self.run.logprobs} lacks the log-probabilities of batch {step} from the beginning of its stage; "
                "remove the checkpoints after that beginning: the stage is then trained again"
            )
        return kept

    def _score_stage(self, first: int) -> None:
        for index in range(first, min(first + self.schedule.updates_per_stage, self.schedule.steps)):
            batch = self.store.wait(index, self.contract, deadline_s=self.wait_deadline_s)
            scored = self.learner.logprobs(batch)
            if self.learner.is_rank_zero:
                self.run.write_old_logprobs(index, scored)
        self.learner.barrier()
