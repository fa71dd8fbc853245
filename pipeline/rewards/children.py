"""Watch the processes that a worker starts, and end them with all their descendants."""

from __future__ import annotations

import itertools
import os
import select
import signal
import time
from collections.abc import Collection, Iterator, Sequence
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
"""Seconds between looks at written files: less than it takes to write half of the limit."""
_SHARED_MEMORY = Path("/dev/shm")


class RunIsGoneError(Exception):
    """The worker must end: its verdict pipe is closed, or only a fresh worker can go on."""


class Children:
    """A worker's forked process and its descendants. `namespace`: the worker is process 1 of a PID namespace."""

    def __init__(self, verdicts: Channel, memory_bytes: int, scratch: Path | None, *, namespace: bool) -> None:
        self.scratch = scratch
        self._verdicts = verdicts
        self._memory_bytes = memory_bytes
        self._namespace = namespace
        self.pid: int | None = None
        """Id of the forked process; None once it has ended."""
        # Under bubblewrap the user's folder may be mounted somewhere below /tmp: what is there now stays.
        self._mounted = frozenset(os.listdir(scratch) if namespace and scratch is not None else ())
        self._newest = b""
        self._next_look_at_files = 0.0
        self._load = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC) if namespace else None

    def look(self) -> None:
        """Check the running process. Raises RunIsGoneError without a run, OverLimitError when it uses too much."""
        if self._verdicts.poll(select.POLLRDHUP, 0.0):
            raise RunIsGoneError
        watch(self._running(), self._memory_bytes)
        if self._wrote_more_than(1):
            raise OverLimitError("files")

    def left_any(self) -> bool:
        """Return whether the process left descendants since the last call, or files of more than half the limit. A
        descendant that holds the socket could answer for the next sample; files could leave it no room."""
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
        """Kill the process and its descendants, wait for them, and return the exit status of the process, if any."""
        pid, self.pid = self.pid, None
        status = None
        if pid is not None:
            for end in (os.killpg, os.kill):
                with suppress(ProcessLookupError, PermissionError):
                    end(pid, signal.SIGKILL)
        if self._namespace:  # one call for all: no fork bomb can outrun it
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        if pid is not None:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        # Orphans became children of this process. Without a namespace they may still run.
        for _ in range(_MAX_ROUNDS):
            try:
                while os.waitpid(-1, 0 if self._namespace else os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                break
            with suppress(OSError):
                kill_children()
        return status

    def empty_scratch(self) -> None:
        """Remove all written files. Raises RunIsGoneError when more than half the limit stays."""
        for folder in self._written():
            empty(folder, self._mounted if folder == self.scratch else frozenset())
        if self._wrote_more_than(2):
            raise RunIsGoneError("files beside a mount cannot be removed: a fresh worker has room")

    def end(self) -> None:
        self.kill()
        if self.scratch is not None and not self._namespace:
            remove(self.scratch)

    def _written(self) -> dict[Path, int]:
        """Return each writable folder and its limit in bytes."""
        if self.scratch is None:
            return {}
        own = {self.scratch: MAX_FILES_BYTES}
        return own | {_SHARED_MEMORY: MAX_SHARED_MEMORY_BYTES} if self._namespace else own

    def _wrote_more_than(self, share: int) -> bool:
        """Return whether some folder holds more than 1 / `share` of its limit."""
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


def kill_children(spare: Collection[int] = ()) -> set[int]:
    """Kill the children of this process but those in `spare`, and return them. Raises OSError without /proc."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split()
    killed = set(map(int, listed)).difference(spare)
    for pid in killed:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return killed


_LONGEST_PATH = 600
_ENTRY_BYTES = 2**14
"""Least size that a file or folder counts as."""


def bytes_below(folder: Path, enough: int = MAX_FILES_BYTES) -> int:
    """Return the disk space of the files below a folder; counting stops above `enough`."""
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
    """Remove everything in a folder but the names in `keep`. Nobody may be writing to it."""
    numbers = itertools.count()
    while True:
        removed = False
        for name in set(os.listdir(folder)) - keep:
            with suppress(OSError):
                removed |= _remove(os.path.join(folder, name), folder, numbers)
        if not removed:
            return


def remove(folder: Path) -> None:
    with suppress(OSError):
        empty(folder)
        os.rmdir(folder)


def _remove(path: str, top: Path, numbers: itertools.count[int]) -> bool:
    """Remove a file or folder and return True. Its subfolders first move up to `top`. Raises OSError."""
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
    """Set up a forked child: a session of its own, standard streams at /dev/null unless kept, nothing else open."""
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
