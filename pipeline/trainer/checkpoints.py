"""Checkpoints are folders that get their name when they are complete.

    .000012.HOST-RANDOM.tmp   every rank writes and hashes its shards, from a copy in host memory, while training goes
                              on; then a thread of rank 0 adds the loop's state, makes all files durable, and adds
                              COMMIT: the step, and size and SHA-256 of every file; with a checksum of its own
    000012                    the same folder, moved onto a name that must be free
    000012/versions/000010    an older version that the learner kept, as an HF folder (kept_versions)

One save is under way at most. Whether it has got on is agreed by all ranks between two steps: `advance`.

Of two learners that save one step, one a superseded one, the first to move its folder wins and the other keeps that. A
folder whose files do not match COMMIT is refused by name: before it is loaded, each rank compares the shards that the
rank of its number has written, and an equal part of the other files.
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
"""Megatron names a shard by the rank that wrote it."""


class Saved(NamedTuple):
    """A checkpoint that has its name; `seconds` since it was begun."""

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
    """Once all shards are written."""
    decided: threading.Lock = field(default_factory=threading.Lock)
    """Taken once, and kept: by the thread of rank 0 that gives the folder its name, or by rank 0 that gives it up."""


@dataclass(frozen=True)
class Checkpoints:
    """The `checkpoints/` folder of a run; keeps the newest `keep`."""

    directory: Path
    keep: int
    fence: Callable[[], None] = unfenced
    """Called on rank 0 before a checkpoint gets its name; raises SupersededError."""
    first_bytes: int = 0
    """What the first checkpoint will take, as far as is known: a disk that has less is said to be too full before."""

    _under_way: list[_Save] = field(init=False, repr=False, compare=False, default_factory=list)
    """One at most."""

    def save(self, learner: MegatronLearner, step: int, state: Mapping[str, float]) -> None:
        """Collective. Once it returns, training can go on at `step`, whatever dies. `state` is what the loop itself
        must remember."""
        self.begin_save(learner, step, state)
        self.advance(learner, to_the_end=True)

    def begin_save(
        self, learner: MegatronLearner, step: int, state: Mapping[str, float], versions: KeptVersions | None = None
    ) -> None:
        """Collective. Copy what a checkpoint of `step` needs, and begin to write it; `versions` are written at once.
        The save before it must be over."""
        if self._under_way:
            raise ValueError(f"the checkpoint of step {self._under_way[0].step} is not written yet; advance to its end")

        def new_folder() -> str:
            """On rank 0. A checkpoint takes what the newest one does; the first, what the learner thinks."""
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
        """Collective. What has been saved since the last look, at the end of the save that is under way or, as it is
        now, if it is over. Raises on every rank what stopped it on any."""
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
            # Once rank 0 may give the folder its name, only rank 0 knows whether it still does.
            if all(
                save.commit is None or (learner.is_rank_zero and save.decided.acquire(blocking=False))
                for save in under_way
            ):
                shutil.rmtree(folder, ignore_errors=True)  # what gets no name must not fill the disk
            raise

    def restore(self, learner: MegatronLearner, versions: KeptVersions | None = None) -> tuple[int, dict[str, float]]:
        """Collective. Load the newest committed checkpoint, and its `versions`; returns the step to go on at (0 when
        there is none) and the state of the loop that was saved with it. Deletes nothing: another learner may be
        writing there."""
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

    def _newest(self) -> tuple[int, dict[str, float]] | None:
        """Return step and state of the loop of the newest checkpoint, whose files have the sizes that COMMIT says.
        Raises CorruptCheckpointError unless the state is numbers by name."""
        # This host may remember a listing for a minute, and forgets it when it changes the folder itself. An older
        # checkpoint would do as well, for twice the work.
        probe = temporary_name(self.directory / "listing")
        probe.mkdir()
        probe.rmdir()
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
    """Mark a complete checkpoint folder. `hashed` are files that the ranks that wrote them have hashed and made
    durable; all others are read and made durable here. Raises CorruptCheckpointError when a file vanishes meanwhile."""
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
    """Check every file against COMMIT, and COMMIT's step against `step`; the sizes of all, the bytes of those that fall
    to a `rank` of so many. Raises CorruptCheckpointError naming the first that differs."""
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
    """COMMIT, whose step and sizes are right: to read all files may take an hour."""
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
    """What the file says."""

    step: int
    files: dict[str, Fingerprint]
    """By name, which may be in a folder within the checkpoint."""


def read_commit(folder: Path) -> Commit:
    """COMMIT of a checkpoint. Raises CorruptCheckpointError, and OSError when the machine fails to read it."""
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
