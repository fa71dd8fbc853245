"""Save and restore checkpoints: folders that get their name when they are complete.

    .000012.HOST-RANDOM.tmp   every rank writes and hashes its shards, from a copy in host memory, while training goes
                              on; then a thread of rank 0 adds the loop's state, makes all files durable, and adds
                              COMMIT: the step, and size and SHA-256 of every file; with a checksum of its own
    000012                    the same folder, moved onto a name that must be free
    000012/versions/000010    an older version that the learner kept, as an HF folder (kept_versions)

At most one save is under way. Between two steps all ranks agree on its progress: `advance`.

If two learners save the same step, one of them superseded, the first to move its folder wins and the other keeps that
folder. A folder whose files do not match COMMIT is refused by name: before loading, each rank checks the shards written
by the rank of its number, and an equal part of the other files.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipeline import spans
from pipeline.background import ANSWER_S, LongAction, in_background, is_over, tell_when_done
from pipeline.data.checksums import (
    MAX_BYTES,
    Fingerprint,
    fingerprints,
    read_sealed_json,
    reason,
    sync_files,
    unseal,
    write_sealed,
    write_sealed_json,
)
from pipeline.data.files import (
    as_disk_full,
    await_visible,
    drop_listing,
    fsync_directory,
    machine_failure,
    make_folder,
    move_to_free_name,
    read_at_most,
    remove_folder,
    require_space,
    temporary_name,
)
from pipeline.data.run_directory import committed_steps, numbered, unfenced
from pipeline.errors import CorruptCheckpointError, StoreError
from precision.text import quoted

if TYPE_CHECKING:
    from megatron_bridge.checkpoint.training_state import ShardSave
    from megatron_bridge.learner import MegatronLearner
    from megatron_bridge.step.host_weights import KeptVersions

COMMIT = "COMMIT"
_LOOP_STATE = "loop_state.json"
_VERSIONS = "versions"
"""Folder of the older versions within a checkpoint."""
_SHARD = re.compile(r"__(\d+)_\d+\.distcp")
"""Name of a shard, with the rank that wrote it."""


class Saved(NamedTuple):
    """A checkpoint that has its name; `seconds` since its begin."""

    step: int
    seconds: float


@dataclass
class _Save:
    folder: Path
    step: int
    state: dict[str, float]
    began: float
    shards: ShardSave
    commit: LongAction[None] | None = None
    """Set once all shards are written."""
    decided: threading.Lock = field(default_factory=threading.Lock)
    """Acquired for good by rank 0's thread that names the folder, or by rank 0 when it gives the folder up."""


@dataclass(frozen=True)
class Checkpoints:
    """The `checkpoints/` folder of a run; keeps the newest `keep`."""

    directory: Path
    keep: int
    fence: Callable[[], None] = unfenced
    """Called on rank 0 before a checkpoint gets its name; raises SupersededError."""
    first_bytes: int = 0
    """Estimated size of the first checkpoint: a disk with less free space is reported as full beforehand."""
    retain: Callable[[], None] = lambda: None
    """Called on rank 0 once a checkpoint has got its name and older ones are removed (Retention.apply)."""

    _under_way: list[_Save] = field(init=False, repr=False, compare=False, default_factory=list)
    """The save under way, at most one."""

    def save(self, learner: MegatronLearner, step: int, state: Mapping[str, float]) -> None:
        """Save a checkpoint, with the loop's `state`; afterwards training can resume at `step`. Collective."""
        self.begin_save(learner, step, state)
        self.advance(learner, to_the_end=True)

    def begin_save(
        self, learner: MegatronLearner, step: int, state: Mapping[str, float], versions: KeptVersions | None = None
    ) -> None:
        """Copy the state for a checkpoint of `step`, and begin to write it; write `versions` at once. Collective."""
        if self._under_way:
            raise ValueError(f"the checkpoint of step {self._under_way[0].step} is not written yet; advance to its end")

        def new_folder() -> str:
            """Create the folder, on rank 0, if there is space for the newest checkpoint's or the estimated size."""
            expected, committed = self.first_bytes, committed_steps(self.directory)
            if committed:
                newest = read_commit(self.directory / numbered(committed[-1]))
                expected = sum(one.num_bytes for one in newest.files.values())
            folder = temporary_name(self.directory / numbered(step))
            make_folder(self.directory)
            require_space(self.directory, expected, f"the checkpoint of step {step}")
            make_folder(folder)
            return folder.name

        folder = self.directory / learner.tell(new_folder)
        with self._or_removed(learner, folder, step):
            shards = learner.begin_save(folder)
            if versions is not None:
                versions.save(folder / _VERSIONS)
        self._under_way.append(_Save(folder, step, dict(state), time.monotonic(), shards))

    def advance(self, learner: MegatronLearner, *, to_the_end: bool = False) -> Saved | None:
        """Return the checkpoint once its save is over; `to_the_end` waits. Raises errors of any rank. Collective."""
        if not self._under_way:
            return None
        save, wait_s = self._under_way[0], ANSWER_S if to_the_end else 0.0
        with self._or_removed(learner, save.folder, save.step):
            while True:
                if save.commit is None and save.shards.advance(wait_s):
                    save.commit = LongAction(learner, lambda: self._commit(save))
                if save.commit is not None and save.commit.look(wait_s):
                    break
                if not to_the_end:
                    return None
        self._under_way.clear()
        return Saved(save.step, time.monotonic() - save.began)

    @contextmanager
    def _or_removed(self, learner: MegatronLearner, folder: Path, step: int) -> Iterator[None]:
        try:
            with as_disk_full(self.directory, f"the checkpoint of step {step}"):
                yield
        except Exception:
            under_way = [*self._under_way]
            self._under_way.clear()
            # Once rank 0's thread may name the folder, only rank 0 knows whether it still will.
            if all(
                save.commit is None or (learner.is_rank_zero and save.decided.acquire(blocking=False))
                for save in under_way
            ):
                shutil.rmtree(folder, ignore_errors=True)  # an unnamed folder must not fill the disk
            raise

    def restore(self, learner: MegatronLearner, versions: KeptVersions | None = None) -> tuple[int, dict[str, float]]:
        """Load the newest committed checkpoint, and its `versions`; return the step to resume at (0 without a
        checkpoint) and the loop's saved state. Deletes nothing, because another learner may be writing there.
        Collective."""
        newest = tell_when_done(learner, self._newest)
        if newest is None:
            return 0, {}
        step, state = newest
        folder = self.directory / numbered(step)
        learner.gather(lambda: await_visible(folder / COMMIT))
        verified = in_background(lambda: verify(folder, step, (learner.rank, learner.num_ranks)), "verify")
        while not all(learner.gather(lambda: is_over(verified, ANSWER_S) and verified.result() is None)):
            pass
        learner.load(folder)
        if versions is not None:
            versions.load(folder / _VERSIONS)
        return step, state

    def _commit(self, save: _Save) -> None:
        folder, step = save.folder, save.step
        write_sealed_json(folder / _LOOP_STATE, save.state)
        with spans.span("save", "commit", step=step):
            commit(folder, step, save.shards.hashed)
        target = self.directory / numbered(step)
        self.fence()
        if not save.decided.acquire(blocking=False):
            raise StoreError(f"{folder} is removed: the save of step {step} failed on another rank; see its log")
        if not move_to_free_name(folder, target):
            if (target / COMMIT).exists():
                verify(target, step)
                remove_folder(folder)
            else:
                remove_folder(target)
                folder.rename(target)
                fsync_directory(self.directory)
        for old in committed_steps(self.directory)[: -self.keep]:
            remove_folder(self.directory / numbered(old))
        self.retain()

    def _newest(self) -> tuple[int, dict[str, float]] | None:
        """Return step and loop state of the newest checkpoint, after comparing its files' sizes with COMMIT. Raises
        CorruptCheckpointError unless the state is numbers by name."""
        drop_listing(self.directory)  # an older checkpoint would also do, at the cost of training twice
        committed = committed_steps(self.directory)
        if not committed:
            return None
        folder = self.directory / numbered(committed[-1])
        _commit_of_whole_files(folder, committed[-1])
        path, remedy = folder / _LOOP_STATE, _remedy(folder)
        if not path.exists():
            return committed[-1], {}
        try:
            state = read_sealed_json(path, remedy)
        except (StoreError, OSError) as error:
            if machine_failure(error) is not None:
                raise
            raise CorruptCheckpointError(str(error)) from error
        for name, value in state.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise CorruptCheckpointError(f"{path}: {quoted(name)} is {quoted(value)}, expected a number; {remedy}")
        return committed[-1], state


def commit(folder: Path, step: int, hashed: Mapping[str, Fingerprint] | None = None) -> None:
    """Mark a checkpoint folder as complete. The files in `hashed` are hashed and durable already; this function does
    both for all others. Raises CorruptCheckpointError if a file vanishes meanwhile."""
    found = dict(hashed or {})
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != COMMIT)
    own = [file for file in files if str(file.relative_to(folder)) not in found]
    sync_files([*own, *sorted({folder, *(file.parent for file in own)})])
    for name, one in found.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != one.num_bytes:
            raise CorruptCheckpointError(f"{folder / name} vanished or changed before its checkpoint was committed")
    for file, read in zip(own, fingerprints(own), strict=True):
        if read is None:
            raise CorruptCheckpointError(f"{file} vanished while its checkpoint was committed; start the run again")
        found[str(file.relative_to(folder))] = read
    content = {name: dict(bytes=one.num_bytes, sha256=one.sha256) for name, one in sorted(found.items())}
    write_sealed(folder / COMMIT, json.dumps(dict(step=step, files=content), indent=1) + "\n")


def verify(folder: Path, step: int | None = None, rank: tuple[int, int] = (0, 1)) -> None:
    """Check a folder against COMMIT, and COMMIT's step against `step`: the sizes of all files, the bytes of the files
    that fall to `rank` (number, number of ranks). Raises CorruptCheckpointError naming the first that differs."""
    committed = _commit_of_whole_files(folder, step)
    shards = {name: int(match[1]) for name in committed.files if (match := _SHARD.match(name))}
    others = sorted(committed.files.keys() - shards.keys())
    number, num_ranks = rank
    names = [name for name, writer in shards.items() if writer % num_ranks == number] + others[number::num_ranks]
    for name, found in zip(names, fingerprints([folder / name for name in names]), strict=True):
        if found != committed.files[name]:
            what = "missing" if found is None else "changed"
            raise CorruptCheckpointError(
                f"{folder / name} does not match its checkpoint's COMMIT ({what}); {_remedy(folder)}"
            )


def _commit_of_whole_files(folder: Path, step: int | None) -> Commit:
    """Return COMMIT after checking its step and the files' sizes: reading all files may take an hour."""
    committed = read_commit(folder)
    if step is not None and committed.step != step:
        raise CorruptCheckpointError(f"{folder} holds the checkpoint of step {committed.step}; {_remedy(folder)}")
    for name, one in committed.files.items():
        if (folder / name).is_file() and (folder / name).stat().st_size != one.num_bytes:
            raise CorruptCheckpointError(
                f"{folder / name} does not match its checkpoint's COMMIT (changed); {_remedy(folder)}"
            )
    return committed


def _remedy(folder: Path) -> str:
    return f"`evenkeel repair {folder.parents[1]}` sets it aside, to go on from the newest whole one before it"


class Commit(NamedTuple):
    """The content of COMMIT."""

    step: int
    files: dict[str, Fingerprint]
    """Fingerprints by file name, which may include a folder within the checkpoint."""


def read_commit(folder: Path) -> Commit:
    """Read COMMIT of a checkpoint. Raises CorruptCheckpointError, and OSError if the machine fails to read it."""
    path = folder / COMMIT
    try:
        value = json.loads(unseal(read_at_most(path, MAX_BYTES)))
        if set(value) != {"step", "files"}:
            raise ValueError(f"it says {sorted(map(str, value))}, expected step and files")
        files = {str(name): Fingerprint(int(one["bytes"]), str(one["sha256"])) for name, one in value["files"].items()}
        if foreign := [name for name in files if Path(name).is_absolute() or ".." in Path(name).parts]:
            raise ValueError(f"it names {foreign[0]}, outside the checkpoint")
        return Commit(int(value["step"]), files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if machine_failure(error) is not None:
            raise
        raise CorruptCheckpointError(f"{path} is damaged ({reason(error)}); {_remedy(folder)}") from error
