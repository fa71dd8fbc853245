"""pi_old: the learner's own log-probabilities of a batch at the weights with which its stage began.

Where every step is published (sync, async) that is the policy just before the step, which is what scoring the step
yields anyway. In a staged run the batches of a stage are scored together before its first step, as trainers with
mini-batches recompute the old log-probabilities of a rollout batch, and kept in the run directory: a learner that is
started again in the middle of a stage has other weights by then.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.data.records import LogprobContract
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
    contract: LogprobContract
    wait_deadline_s: float

    def of(self, step: int) -> NDArray[np.float32] | None:
        """[responses] for batch `step`, None where they are those of the scored step. Collective.

        The first step of a stage waits for all batches of the stage, and scores them. Raises StoreError when those of a
        stage that is under way are missing.
        """
        if self.schedule.kind != "staged":
            return None
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
