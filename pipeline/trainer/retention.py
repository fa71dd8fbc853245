"""Remove old batches and the learner's log-probabilities of them, as run.keep_batches and run.keep_logprobs say.

    when        a checkpoint has got its name, and checkpoints beyond checkpoint.keep are removed; at a start with
                nothing left to train. The learner's rank 0, under its fence
    kept        batches from the oldest checkpoint on, which a resume, a repair or a fork may train again, and the
                newest `keep_batches` that the newest checkpoint has learned from; log-probabilities alike
    order       the checkpoints' removal is durable ──▶ a record of each batch is durable ──▶ its file is unlinked

A killed removal is finished by the next. Readers believe the record (pipeline.data.store), so a batch is removed from
the moment it is there, and one that is missing without a record is damage. A fork has links or copies of its own.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.data.files import fsync_directory, make_folder
from pipeline.data.run_directory import RunDirectory, numbered_files
from pipeline.data.store import BATCH_SUFFIX, REMOVED, BatchStore, Entry, RemovedBatch
from pipeline.errors import CorruptBatchError
from pipeline.rollout.batch_builder import attempts


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What a run keeps; None: all."""

    run: RunDirectory
    keep_batches: int | None
    keep_logprobs: int | None
    solved_at: float
    """As in SolvedPromptRule, for the attempts that a record counts."""

    def apply(self) -> None:
        """Remove what the newest checkpoint lets go. Raises SupersededError, and OSError when the machine fails. A
        damaged batch stays, for `evenkeel repair`."""
        run, saved = self.run, self.run.saved_steps()
        if not saved:
            return
        fsync_directory(run.checkpoints)  # a power cut must not bring one back that needs what is removed here

        def first(keep: int | None) -> int:
            return 0 if keep is None else min(saved[0], saved[-1] - keep)

        store, first_batch = BatchStore(run.batches), first(self.keep_batches)
        for index in store.committed() if first_batch > 0 else ():
            if index >= first_batch:
                break
            with suppress(CorruptBatchError):
                self._record(store, index)
        removed, files = store.removed(), list[Path]()
        if removed:
            batches = numbered_files(run.batches, BATCH_SUFFIX)
            files += [batches[index] for index in removed if index in batches]
        if (first_scores := max(first_batch, first(self.keep_logprobs))) > 0:
            for ending in (".npy", "-old.npy"):
                files += [path for step, path in numbered_files(run.logprobs, ending).items() if step < first_scores]
        run.fence()
        for path in files:
            path.unlink(missing_ok=True)

    def _record(self, store: BatchStore, index: int) -> None:
        batch = store.read_samples(index)
        tried = attempts(batch, self.solved_at)
        record = RemovedBatch(
            **vars(Entry.of(batch)),
            checksum=store.checksum(index),
            attempts=tuple((problem, one.samples, one.solved) for problem, one in tried.items()),
        )
        self.run.fence()
        make_folder(self.run.batches / REMOVED)
        with suppress(FileExistsError):  # a learner that this one supersedes was as far
            record.write(store.removed_path(index))
