"""Limits of one process in the sandbox, and what they cannot limit: the watch over memory, processes and files.

The kernel limits each process (setrlimit). RLIMIT_AS is left alone: just-in-time compilers reserve far more addresses
than they use. RLIMIT_NPROC too: it counts all processes of the user, and root is exempt. What several processes use
together is looked at every `WATCH_EVERY_S`, and what is above the limit is killed.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from collections.abc import Iterable

WATCH_EVERY_S = 0.05
MAX_TASKS = 256
"""Processes and threads of one worker together."""
MAX_FILES_BYTES = 256 * 2**20
"""Written to its private folder, together and into one file."""
MAX_SHARED_MEMORY_BYTES = 64 * 2**20
"""Written to /dev/shm, where there is one."""
_MAX_OPEN_FILES = 1024
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 24, 38, 47, 4
_PR_SET_DUMPABLE = 4
_CAPABILITIES_3 = 0x20080522
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class OverLimitError(Exception):
    """What was too much: memory, processes or files."""


def limit_this_process(memory_bytes: int) -> None:
    """Set the limits that the kernel keeps. They hold for each process that this one starts, too."""
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_DATA, memory_bytes),
        (resource.RLIMIT_FSIZE, MAX_FILES_BYTES),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (least, least))


def give_up_privileges() -> None:
    """Drop every capability, root's too, and the ways to get one back. Raises OSError where the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    for capability in range(64):  # without the right to drop one there is none to drop
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header, none = struct.pack("Ii", _CAPABILITIES_3, 0), struct.pack("6I", *[0] * 6)
    _checked(libc.capset(header, none), "capset")


def hide_from_others(*, hidden: bool) -> None:
    """Whether processes of the same user may look into this one (ptrace, /proc/PID/mem, /proc/PID/fd)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, int(not hidden), 0, 0, 0)


def _checked(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def watch(processes: Iterable[int], memory_bytes: int) -> None:
    """Raises OverLimitError when there are too many processes, or they use too much memory together."""
    pages = tasks = 0
    for pid in processes:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        tasks, pages = tasks + int(fields[17]), pages + int(fields[21])
    if tasks > MAX_TASKS:
        raise OverLimitError("processes")
    if pages * _PAGE_BYTES > memory_bytes:
        raise OverLimitError("memory")
