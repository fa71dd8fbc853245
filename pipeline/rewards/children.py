"""The processes that a worker starts: looked at while they run, ended with all that they started."""

from __future__ import annotations

import itertools
import os
import select
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pipeline.rewards.messages import Channel
from pipeline.rewards.sandbox.confine import (
    MAX_FILES_BYTES,
    MAX_SHARED_MEMORY_BYTES,
    OverLimitError,
    hide_from_others,
    watch,
)

_MAX_ROUNDS = 100
_FILES_EVERY_S = 0.05
"""Less than it takes to write half of what may be written."""
_SHARED_MEMORY = Path("/dev/shm")


class RunIsGoneError(Exception):
    """The worker has to end: its verdict pipe has, or it is worn out, and the pool starts another one."""


class Children:
    """One process at a time, and what it starts. `namespace`: this process is process 1 of a PID namespace."""

    def __init__(self, verdicts: Channel, memory_bytes: int, scratch: Path | None, *, namespace: bool) -> None:
        self.scratch = scratch
        self._verdicts = verdicts
        self._memory_bytes = memory_bytes
        self._namespace = namespace
        self.pid: int | None = None
        """What was forked; None once it is ended."""
        # Under bubblewrap the user's folder may be mounted somewhere below /tmp: what is there now stays.
        self._mounted = frozenset(os.listdir(scratch) if namespace and scratch is not None else ())
        self._newest = b""
        self._next_look_at_files = 0.0
        self._load = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC) if namespace else None

    def look(self) -> None:
        """While it runs. Raises RunIsGoneError, and OverLimitError when it and what it started use too much."""
        if self._verdicts.poll(select.POLLRDHUP, 0.0):
            raise RunIsGoneError
        watch(self._running(), self._memory_bytes)
        if self._wrote_more_than(1):
            raise OverLimitError("files")

    def left_any(self) -> bool:
        """Whether it left a process behind since this was last asked: one that holds its socket could answer for the
        next sample. Or half as many bytes as may be written: the next sample would find no room."""
        if time.monotonic() >= self._next_look_at_files:
            self._next_look_at_files = time.monotonic() + _FILES_EVERY_S
            if self._wrote_more_than(2):
                return True
        if self._load is None:
            return False
        # The newest number of this PID namespace: another one after each process and thread that was started.
        newest = os.pread(self._load, 100, 0).rpartition(b" ")[2]
        if newest == self._newest:
            return False
        self._newest = newest
        return set(self._running()) != {self.pid}

    def kill(self) -> int | None:
        """End all of them and wait until they are gone. The exit status of the process that began, if there is one."""
        pid, self.pid = self.pid, None
        status = None
        if pid is not None:
            for end in (os.killpg, os.kill):
                with suppress(ProcessLookupError, PermissionError):
                    end(pid, signal.SIGKILL)
        if self._namespace:  # the kernel does it at one blow: no fork bomb can outrun it
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        if pid is not None:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        # What lost its parent became a child of this process. Without a namespace it may still run.
        for _ in range(_MAX_ROUNDS):
            try:
                while os.waitpid(-1, 0 if self._namespace else os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                break
            with suppress(OSError):
                orphans = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split()
                for orphan in orphans:
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(int(orphan), signal.SIGKILL)
        return status

    def empty_scratch(self) -> None:
        """Remove what was written."""
        for folder in self._written():
            empty(folder, self._mounted if folder == self.scratch else frozenset())
        if self._wrote_more_than(2):
            raise RunIsGoneError("what was written beside a mount cannot be removed: a fresh worker has room")

    def end(self) -> None:
        """Leave nothing behind."""
        self.kill()
        if self.scratch is not None and not self._namespace:
            remove(self.scratch)

    def _written(self) -> dict[Path, int]:
        """The folders that can be written to, and how many bytes."""
        if self.scratch is None:
            return {}
        own = {self.scratch: MAX_FILES_BYTES}
        return own | {_SHARED_MEMORY: MAX_SHARED_MEMORY_BYTES} if self._namespace else own

    def _wrote_more_than(self, share: int) -> bool:
        """Whether some folder holds more than one part in `share` of what it may."""
        for folder, limit in self._written().items():
            if self._namespace:  # what is used of the file system that is mounted there
                status = os.statvfs(folder)
                blocks = (status.f_blocks - status.f_bfree) * status.f_frsize
                used = max(blocks, (status.f_files - status.f_ffree) * _ENTRY_BYTES)
            else:
                used = bytes_below(folder)
            if used > limit // share:
                return True
        return False

    def _running(self) -> Iterator[int]:
        if self._namespace:
            yield from (int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1")
        elif self.pid is not None:
            yield self.pid


_LONGEST_PATH = 600
_ENTRY_BYTES = 2**14
"""What a file or folder counts at least."""


def bytes_below(folder: Path, enough: int = MAX_FILES_BYTES) -> int:
    """What the files below it take; counted until it is more than enough."""
    total, folders = 0, [os.fspath(folder)]
    while folders and total <= enough:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    total += max(status.st_blocks * 512, _ENTRY_BYTES)
                    if len(entry.path) > _LONGEST_PATH:  # nobody needs such a tree, and each look at it takes seconds
                        return 2 * enough
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except OSError:  # gone meanwhile, or not to be listed
            continue
    return total


def empty(folder: Path, keep: frozenset[str] = frozenset()) -> None:
    """Remove what lies there, but for the names to keep. Only while nobody writes to it."""
    numbers = itertools.count()
    while True:
        removed = False
        for name in set(os.listdir(folder)) - keep:
            with suppress(OSError):
                removed |= _remove(os.path.join(folder, name), folder, numbers)
        if not removed:
            return


def remove(folder: Path) -> None:
    """Empty it and remove it, if it is there."""
    with suppress(OSError):
        empty(folder)
        os.rmdir(folder)


def _remove(path: str, top: Path, numbers: itertools.count[int]) -> bool:
    """Remove a file, or a folder, whose own folders move up to `top` first. Returns True; raises OSError."""
    if os.path.islink(path) or not os.path.isdir(path):
        os.unlink(path)
        return True
    os.chmod(path, 0o700)
    for name in os.listdir(path):
        below = os.path.join(path, name)
        if os.path.isdir(below) and not os.path.islink(below):
            os.chmod(below, 0o700)
            os.rename(below, os.path.join(top, f".removed-{next(numbers)}-{os.getpid()}"))
        else:
            os.unlink(below)
    os.rmdir(path)
    return True


def prepare_child(keep: Sequence[int]) -> None:
    """After a fork: a process group of its own, standard streams that lead nowhere unless kept, nothing else open."""
    os.setsid()
    hide_from_others(hidden=False)
    for number in (signal.SIGTERM, signal.SIGPIPE, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in {0, 1, 2}.difference(keep):
        os.dup2(nowhere, descriptor)
    start = 3
    for descriptor in sorted(number for number in keep if number > 2):
        os.closerange(start, descriptor)
        start = descriptor + 1
    os.closerange(start, os.sysconf("SC_OPEN_MAX"))
