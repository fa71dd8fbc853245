"""Take turns with engines on the same GPUs (rollout.colocated): who may hold their memory when.

    engines sample            learner: parameters alone, the rest is parked       lock: free; an engine may start
    batch is committed        take: lock ─▶ engines sleep ─▶ unpark
    learner trains            engines: processes alone                            lock: the learner's
    step is saved             give: park ─▶ unlock
    publish                   engines take back weights and graphs, are given weights, take back keys and values

The lock is a file's (flock) on the one machine that all share: the kernel frees it with a process that is killed. An
engine's role shares it while its server starts: none starts while the learner holds memory, and the learner waits until
none is starting. A killed learner leaves engines that sleep: its next start finds them so, and its next publish wakes
them. It begins once it is its turn (launch.roles.learner): earlier, engines could not make the batch that it needs.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.data.files import make_folder
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import DeadlineExceededError

if TYPE_CHECKING:
    from megatron_bridge.learner import MegatronLearner

_POLL_S = 0.05


class GpuLock:
    """The lock on the memory of the GPUs of a run."""

    def __init__(self, run: RunDirectory) -> None:
        self._path: Path = run.path / "engines" / "gpus.lock"
        self._file: int | None = None

    def take(self, deadline_s: float, check: Callable[[], None] = lambda: None, *, shared: bool = False) -> None:
        """Take the lock if this object does not hold it, `shared` with others that share it. `check` is called while
        it waits, and may raise. Raises DeadlineExceededError."""
        if self._file is not None:
            return
        make_folder(self._path.parent)
        ends = time.monotonic() + deadline_s
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                    self._file, file = file, -1
                    return
                except BlockingIOError:
                    check()
                if time.monotonic() > ends:
                    other = "the learner trains" if shared else "an engine is starting"
                    raise DeadlineExceededError(
                        f"{self._path} was not free within {deadline_s:g} s: {other}; see RUN/logs"
                    )
                time.sleep(_POLL_S)
        finally:
            if file >= 0:
                os.close(file)

    def release(self) -> None:
        """Let others have the lock. No effect where it is not held."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


@dataclass(frozen=True, kw_only=True)
class GpuTurns:
    """The learner's side of the turns. Every method is collective."""

    learner: MegatronLearner
    lock: GpuLock
    """Of rank 0, which took it before any rank built its part of the model."""
    put_engines_to_sleep: Callable[[], None]
    deadline_s: float
    """Longest wait for engines that are starting."""

    def take(self) -> None:
        """Have the engines give up their memory, and take back what is parked."""
        self.learner.tell(lambda: self.lock.take(self.deadline_s))
        self.put_engines_to_sleep()
        self.learner.parking.unpark()

    def give(self) -> None:
        """Park gradients and optimizer state: the next publish wakes the engines."""
        self.learner.parking.park()
        self.learner.barrier()
        self.lock.release()
