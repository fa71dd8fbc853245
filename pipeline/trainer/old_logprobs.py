"""Find pi_old, the learner's own log-probabilities of a batch at weights before the steps that are taken on it.

staged                            the weights at the stage's begin. All batches of a stage are scored before its first
                                  step that is not skipped, and kept in the run directory, because a learner that is
                                  restarted within a stage has other weights by then
sync, async; several updates      the weights before the batch's first update. The batch is scored as a whole, as
                                  trainers with mini-batches do
sync, async; one update a batch   the weights before the step, which scoring the step yields anyway
async, learner.old_logprobs_at    the weights of the version that sampled each token, from kept copies. In sync and
  sampling                        staged this changes nothing: the weights above are the sampling weights
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.background import tell_when_done
from pipeline.data.batch import Batch
from pipeline.data.checksums import fingerprints, read_sealed_json, write_sealed_json
from pipeline.data.files import await_visible
from pipeline.data.run_directory import RunDirectory, numbered
from pipeline.errors import RunConflictError, StoreError
from pipeline.schedule import Schedule
from pipeline.spans import Stopwatch
from pipeline.trainer.batches import BatchSource
from precision.torch_on_use import Tensor, torch

if TYPE_CHECKING:
    from megatron_bridge.learner import MegatronLearner
    from megatron_bridge.step.host_weights import KeptVersions


@dataclass(frozen=True, kw_only=True)
class OldLogprobs:
    """The source of pi_old for objectives and corrections that divide by it."""

    run: RunDirectory
    batches: BatchSource
    learner: MegatronLearner
    schedule: Schedule
    updates_per_batch: int
    versions: KeptVersions | None = None
    """Kept policy versions, if pi_old is the sampling policy and that may be an older version."""
    _stage: dict[int, Tensor] = field(default_factory=dict)
    """This process's scores of the stage under way that are not used yet, in host memory; the same on every rank."""

    def of(self, batch: Batch, watch: Stopwatch, meanwhile: Callable[[], None]) -> Tensor | None:
        """Return pi_old [responses], or None if it is the scored step's own. Collective; called before the first
        update. The first batch of a stage that was not lost waits for all batches of the stage and scores them;
        `meanwhile` is called during the wait as in BatchSource.wait. `watch` times waiting and scoring apart. Raises
        the errors of that wait, and StoreError if scores of a stage under way are missing."""
        if self.schedule.kind != "staged":
            with watch.phase("logprobs"):
                if self.versions is not None and (sampled := self.versions.logprobs(batch)) is not None:
                    return sampled
                return self.learner.score(batch) if self.updates_per_batch > 1 else None
        step = batch.index
        first = self.schedule.required_version(step)
        # Only a skipped step leaves the weights unchanged: a batch may also be lost after a step was trained on it.
        if step not in self._stage and self.learner.tell(lambda: {*range(first, step)} <= {*self.run.skipped_steps()}):
            self._stage.clear()
            for index in range(step, min(first + self.schedule.updates_per_stage, self.schedule.steps)):
                with watch.phase("wait"):
                    found = self.batches.wait(index, meanwhile)
                if found is None:
                    continue
                with watch.phase("logprobs"):
                    self._stage[index] = self.learner.score(found).cpu()
                    self.learner.tell(partial(self.run.write_logprobs, index, self._stage[index].numpy(), old=True))
        with watch.phase("logprobs"):
            return self._stage.pop(step) if step in self._stage else self._kept(batch)

    def _kept(self, batch: Batch) -> Tensor:
        """Return the scores that an earlier start of the learner has written."""
        step = batch.index
        path = self.run.logprobs / f"{numbered(step)}-old.npy"
        if not self.learner.tell(path.exists):
            raise StoreError(
                f"{self.run.logprobs} lacks the log-probabilities of batch {step} from the beginning of its stage; "
                f"`evenkeel repair {self.run.path}` goes back to a checkpoint from which the stage is trained again"
            )
        found: list[Tensor] = []

        def read() -> None:
            await_visible(path)
            kept = self.run.old_logprobs(step, len(batch.rollout_logprobs))
            assert kept is not None, path
            found.append(torch.from_numpy(kept))

        self.learner.gather(read)
        return found[0]


def require_same_reference(run: RunDirectory, learner: MegatronLearner, folder: Path) -> None:
    """Record the digests of the reference's weights at the first start; compare them at every later start. A replaced
    folder would silently hold the policy near other weights. Collective. Raises RunConflictError for other weights."""

    def record_or_compare() -> None:
        files = sorted(folder.glob("*.safetensors"))
        found = {file.name: one.sha256 for file, one in zip(files, fingerprints(files), strict=True) if one is not None}
        path = run.reference_file
        if not path.exists():
            run.fence()
            write_sealed_json(path, found)
        elif read_sealed_json(path, "put back a copy, or begin another run.name") != found:
            raise RunConflictError(
                f"{folder} holds other weights than the reference that this run began with ({path}); put them back, or "
                "begin another run.name"
            )

    tell_when_done(learner, record_or_compare)
