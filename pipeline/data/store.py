"""Commit and read batches: one batch = one zipped Zarr v3 group = one file, committed by fsync and a hard link.

Zarr promises nothing across chunks: after a killed write an array still opens, and missing chunks read as fill values.
So a batch is built in memory, written to a temporary name, made durable, and only then named. A read verifies the
file's checksum, a crc32c and a digest per chunk, and the consistency of the ragged arrays. A rank reads and verifies
the chunks of its samples alone.

One collector writes; a second one on any host, which still believes to be the collector, loses: a link never replaces a
file. Any number of processes may read and wait. They wait for a batch by its name: a run may have 100,000 of them.

    RUN/batches/000012.zarr.zip      batch 12
    RUN/batches/000012.lost.json     batch 12 was lost by damage: made by `evenkeel repair`, exclusively, never changed
    RUN/batches/removed/000012.json  batch 12 was removed by run.keep_batches: made by the learner alone, likewise

A batch that is gone keeps its place: no other batch asks its groups. Those of a lost batch follow from its neighbors:
the batch before names the open groups, the batch after the closed ones and its own. Once there is a record, it counts,
and not a file that may lie beside it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, Self, TypeVar

import numpy as np

from pipeline.data.batch import Batch, LogprobContract, Share
from pipeline.data.batch_format import (
    Choose,
    arrays_of,
    attributes_of,
    check_batch,
    num_bytes,
    read_attributes,
    read_batch,
    read_share,
    with_digests,
)
from pipeline.data.batch_values import UNKNOWN, Limits, check_values
from pipeline.data.checksums import TRAILER, TRAILER_BYTES, crc32, create_sealed, read_sealed_json
from pipeline.data.files import (
    as_disk_full,
    await_visible,
    creating,
    is_there,
    make_folder,
    open_regular,
    require_space,
)
from pipeline.data.run_directory import RunDirectory, numbered, numbered_files, numbers_of, unfenced
from pipeline.data.zarr_zip import damage_as, open_zarr_zip, seek_zarr_zip, write_zarr_zip
from pipeline.errors import CorruptBatchError, RetryableError, StoreError
from precision.text import one_line

BATCH_SUFFIX, LOST_SUFFIX, REMOVED = ".zarr.zip", ".lost.json", "removed"
T = TypeVar("T")
Known = Literal["all", "together", "first"]
"""The certainty about a lost batch's groups. all: exactly these. together: several consecutive lost batches had these.
first: no later batch is known, so it had at least these, and replacements of dropped groups are asked again."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The groups of a batch, committed or gone."""

    index: int
    groups: tuple[int, ...]
    """Those trained on and those dropped, ascending."""
    next_group: int
    """As in Batch."""
    open_groups: tuple[int, ...]
    """As in Batch."""

    @staticmethod
    def of(batch: Batch) -> Entry:
        groups = {*np.unique(batch.group).tolist(), *(drop.group for drop in batch.dropped)}
        return Entry(
            index=batch.index,
            groups=tuple(sorted(groups)),
            next_group=batch.next_group,
            open_groups=batch.open_groups,
        )


@dataclass(frozen=True, kw_only=True)
class GoneBatch(Entry):
    """The record of a batch whose file is gone."""

    suffix: ClassVar[str] = ".json"

    def write(self, path: Path) -> None:
        """Create the record. Raises FileExistsError if it exists."""
        create_sealed(path, json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a record. Raises StoreError for damage."""
        run = next(folder.parent for folder in path.parents if folder.name != REMOVED)
        remedy = f"repair the run: `evenkeel repair {run}`"
        fields = read_sealed_json(path, remedy)
        try:
            gone = cls(**{name: _as_tuple(value) for name, value in fields.items()})
            if f"{numbered(gone.index)}{cls.suffix}" != path.name:
                raise ValueError(f"it is that of batch {gone.index}")
            return gone
        except (ValueError, TypeError) as error:
            raise StoreError(f"{path} is damaged ({error}); {remedy}") from error


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


@dataclass(frozen=True, kw_only=True)
class LostBatch(GoneBatch):
    """A batch that was lost by damage. Its `next_group` and `open_groups` are as if it had been committed."""

    suffix = LOST_SUFFIX

    reason: str
    """The failed check, or that the file was missing."""
    recorded: str
    """The UTC time and process of the record."""
    learned: bool
    """Whether the newest checkpoint had learned from it. If not, its step is skipped."""
    known: Known

    def __str__(self) -> str:
        learned = "the learner had learned from it" if self.learned else "its step is skipped"
        return f"batch {self.index} was lost by damage ({self.reason}; recorded {self.recorded}); {learned}"


@dataclass(frozen=True, kw_only=True)
class RemovedBatch(GoneBatch):
    """A batch that the learner had learned from, and removed since no checkpoint needs it any more."""

    checksum: str
    """That of its file (BatchStore.checksum)."""
    attempts: tuple[tuple[int, int, int], ...]
    """(problem, its samples, those that solved it), as the run counted when the batch was removed."""

    def __str__(self) -> str:
        return f"batch {self.index} was removed by run.keep_batches, after the learner had learned from it"


class BatchStore:
    """The committed batches of a run; `directory` is the run's `batches` folder, made on first use."""

    def __init__(self, directory: Path, fence: Callable[[], None] = unfenced, *, limits: Limits = UNKNOWN) -> None:
        """`fence` is called just before a batch gets its name. Batches outside `limits` are not committed or read."""
        self.directory = directory
        self._fence = fence
        self._limits = limits
        self._list_again = 0.0
        """When `is_settled` may list next, by time.monotonic."""
        make_folder(directory)

    def path(self, index: int) -> Path:
        return self.directory / f"{numbered(index)}{BATCH_SUFFIX}"

    def committed(self) -> list[int]:
        """Return the indices of all committed batches that were not removed, ascending."""
        return sorted({*numbers_of(self.directory, BATCH_SUFFIX)} - {*self.removed()})

    def lost_path(self, index: int) -> Path:
        return self.directory / f"{numbered(index)}{LOST_SUFFIX}"

    def removed_path(self, index: int) -> Path:
        return self.directory / REMOVED / f"{numbered(index)}{RemovedBatch.suffix}"

    def gone(self, index: int) -> LostBatch | RemovedBatch | None:
        """Return the record of batch `index` if it was lost or removed, or None. Raises StoreError for damage."""
        if (path := self.lost_path(index)).exists():  # not by listing: reading n batches would list n times
            return LostBatch.read(path)
        return RemovedBatch.read(path) if (path := self.removed_path(index)).exists() else None

    def found(self, index: int, read: Callable[[int], T]) -> T | LostBatch | RemovedBatch:
        """Return what `read` reads of batch `index`, or its record if it is gone, perhaps only since it was listed."""
        try:
            return self.gone(index) or read(index)
        except StoreError:
            if (gone := self.gone(index)) is None:
                raise
            return gone

    def all_lost(self) -> list[LostBatch]:
        """Return the records of all lost batches, ascending."""
        return [LostBatch.read(path) for path in numbered_files(self.directory, LOST_SUFFIX).values()]

    def removed(self) -> list[int]:
        """Return the indices of removed batches, ascending."""
        return [*numbered_files(self.directory / REMOVED, RemovedBatch.suffix)]

    def settled(self) -> list[int]:
        """Return the indices of committed and gone batches, ascending."""
        there = numbers_of(self.directory, BATCH_SUFFIX, LOST_SUFFIX)
        return sorted({*there, *self.removed()})  # listed last: a record is there before its batch is unlinked

    def is_settled(self, index: int) -> bool:
        """Return whether batch `index` is committed or lost, for processes that wait for it. Mounts may remember for
        long that a name was missing (FUSE with negative_timeout), but show it in a listing: so the folder is listed,
        too, for at most a hundredth of the wait."""
        if is_there(self.path(index)) or is_there(self.lost_path(index)):
            return True
        if (began := time.monotonic()) < self._list_again:
            return False
        is_listed = index in self.settled()
        self._list_again = time.monotonic() + 100 * (time.monotonic() - began)
        return is_listed

    @property
    def next_index(self) -> int:
        """The first batch to make, perhaps again after its file was deleted."""
        return next(i for i, found in enumerate([*self.settled(), -1]) if i != found)

    def holes(self, steps: int) -> list[int]:
        """Return the missing batches below the newest one and `steps`, ascending."""
        settled = [index for index in self.settled() if index < steps]
        return sorted({*range(max(settled, default=0))} - {*settled})

    def groups_to_ask(self) -> tuple[int, tuple[int, ...]]:
        """Return `next_group` and `open_groups` (see Batch) before batch `next_index`. Raises as `read` does."""
        index = self.next_index
        if index == 0:
            return 0, ()
        newest = self.gone(index - 1) or self.read(index - 1, None)
        return newest.next_group, newest.open_groups

    def commit(self, batch: Batch) -> Path:
        """Make `batch` durable, then visible. Raises RetryableError when another process was first,
        SupersededError behind the fence, DiskFullError, and StoreError for inconsistent arrays, impossible values
        (pipeline.data.batch_values), and a file that readers would refuse."""
        path = self.path(batch.index)
        if path.exists():
            self._refuse_second(path)
        try:
            check_batch(batch)
            check_values(batch, self._limits)
        except ValueError as error:
            raise StoreError(
                f"refused to commit batch {batch.index}: {error}; correct the code that built it"
            ) from error
        require_space(self.directory, num_bytes(batch), f"batch {batch.index}")
        try:
            with as_disk_full(self.directory, path.name), creating(path, before=self._fence) as file:
                attributes, arrays = attributes_of(batch), arrays_of(batch)
                write_zarr_zip(file, with_digests(attributes, arrays), arrays)
                file.flush()
                # A batch that no reader accepts would be in the way forever. Only cheap checks: the arrays' bytes were
                # just made.
                try:
                    with seek_zarr_zip(Path(file.name)) as written:
                        read_attributes(written)
                except (ValueError, LookupError, TypeError) as error:
                    raise StoreError(
                        f"refused to commit batch {batch.index}: its file could not be read back "
                        f"({one_line(error, 300)}); correct the code that built the batch"
                    ) from error
        except FileExistsError:
            self._refuse_second(path)
        except (StoreError, FileNotFoundError):
            self._fence()  # the new collector has removed our temporary file
            raise
        return path

    def _refuse_second(self, path: Path) -> NoReturn:
        self._fence()  # names the collector that has taken over
        made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(path.stat().st_mtime))
        raise RetryableError(
            f"{path} is committed already, at {made} by an earlier start of the collector (see epochs/collector); "
            "batches are never rewritten: start the collector again, it goes on with the next one"
        )

    def read(
        self,
        index: int,
        contract: LogprobContract | None,
        *,
        visible_s: float = 0.0,
        check: bool = True,
        choose: Choose | None = None,
    ) -> Batch:
        """Read and verify batch `index`, under any contract for `contract` None. Waits up to `visible_s` for a batch
        that another host has committed (files.VISIBLE_S). Without `check`, impossible values are accepted, for
        inspection. With `choose`, tokens of other samples are neither read nor verified (Batch.share).

        Raises StoreError when there is no such batch and for another contract, CorruptBatchError when its file fails a
        check, OSError when the machine fails to read it.
        """
        path = self.path(index)
        if (gone := self.gone(index)) is not None:
            raise StoreError(f"{gone}; there is nothing to read")
        if visible_s:
            await_visible(path, visible_s)
        if not path.is_file():
            there = self.committed()
            others = (
                f"batches {there[0]} to {there[-1]} are there" if there else "start the collector to make the first"
            )
            raise StoreError(f"batch {index} is not committed: no file {path}; {others}")
        with self._damage_as_corrupt(path):
            if choose is None:
                batch = read_batch(open_zarr_zip(path))
            else:
                with seek_zarr_zip(path) as file:
                    batch = read_share(file, choose)
            if batch.index != index:
                raise ValueError(f"the file holds batch {batch.index}")
            if check:
                check_values(batch, self._limits)
        if contract is not None and batch.contract != contract:
            theirs, ours = asdict(batch.contract), asdict(contract)
            differing = (f"{key} {theirs[key]!r} (expected {ours[key]!r})" for key in ours if theirs[key] != ours[key])
            raise StoreError(
                f"{path} was sampled under another logprob contract: {', '.join(differing)}; train it with the recipe "
                "and tokenizer that sampled it, or start a run under a new name"
            )
        return batch

    def read_samples(self, index: int) -> Batch:
        """Read batch `index` without its tokens, for fields of whole samples such as rewards. Raises as `read` does."""
        return self.read(index, None, choose=lambda batch: Share(ranks=np.zeros(batch.num_samples, np.int64), rank=-1))

    def num_samples(self, index: int) -> int:
        """Return the number of samples of batch `index`, episodes where these have several turns. Raises
        CorruptBatchError, also for a missing file, OSError."""
        path = self.path(index)
        with self._damage_as_corrupt(path), seek_zarr_zip(path) as file:
            if (found := read_attributes(file)[0]["index"]) != index:
                raise ValueError(f"the file holds batch {found}")
            if "episode_number" in file.arrays:
                return len(np.unique(file.rows("episode_number")))
            return file.arrays["prompt_lengths"].shape[0]

    def checksum(self, index: int) -> str:
        """Return a mark that changes with a settled batch: the checksum of its file, not verified and also if it was
        removed since, or of its record of loss. Raises CorruptBatchError for a file without one."""
        found = self.found(index, self._trailer)
        if isinstance(found, LostBatch):
            return f"lost {crc32(self.lost_path(index).read_bytes())}"
        return found.checksum if isinstance(found, RemovedBatch) else found

    def _trailer(self, index: int) -> str:
        path = self.path(index)
        with self._damage_as_corrupt(path), open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TRAILER_BYTES))
            ending = file.read()
            if TRAILER.fullmatch(ending) is None:
                raise ValueError("it does not end in its checksum")
            return ending.decode()

    def _damage_as_corrupt(self, path: Path) -> AbstractContextManager[None]:
        remedy = (
            f"put back a copy of it, or stop the run and repair it: `evenkeel repair {self.directory.parent}` says "
            "whether it can be made again"
        )
        return damage_as(path, CorruptBatchError, remedy)


def refuse_to_pass_gone(run: RunDirectory, first: int, end: int) -> None:
    """Raise StoreError when steps first … end - 1 cannot be repeated: one had learned from a batch that is gone."""
    store, skipped = BatchStore(run.batches), run.skipped_steps()
    removed = (RemovedBatch.read(store.removed_path(index)) for index in store.removed())
    for batch in (*store.all_lost(), *removed):
        if first <= batch.index < end and batch.index not in skipped:
            raise StoreError(
                f"{batch}: steps from {batch.index} on cannot be repeated as they were; what can be read of the run "
                f"is listed by `evenkeel verify history {run.path}`"
            )


_NOTHING = Entry(index=-1, groups=(), next_group=0, open_groups=())


def entry(store: BatchStore, index: int) -> Entry:
    """Return the entry of batch `index`, or for -1 that before the first. Raises as BatchStore.read does."""
    return _NOTHING if index < 0 else store.gone(index) or Entry.of(store.read(index, None))


def groups_between(before: Entry, after: Entry) -> list[int]:
    """Return the groups of the batches between two consecutive known entries, ascending."""
    candidates = {*before.open_groups, *range(before.next_group, after.next_group)}
    return sorted(candidates - set(after.open_groups) - set(after.groups))
