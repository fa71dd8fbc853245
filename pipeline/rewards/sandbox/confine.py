"""Confine a process before foreign code runs in it: limits, no privileges, Landlock, a filter of system calls.

The kernel limits each process (setrlimit). RLIMIT_AS is left alone: just-in-time compilers reserve far more addresses
than they use. RLIMIT_NPROC too: it counts all processes of the user, and root is exempt. The joint use of several
processes is checked every `WATCH_EVERY_S`, and processes above the limit are killed.

Landlock restricts a thread, and all that it starts, to the named folders and files. It needs no privilege and no
namespace, so it works in containers that forbid both. The filter refuses what Landlock does not cover (modes, times,
signals on older kernels, sockets).
"""

from __future__ import annotations

import ctypes
import os
import resource
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.rewards.sandbox.system_calls import refuse_system_calls

Rung = Literal["bubblewrap", "landlock"]

WATCH_EVERY_S = 0.05
MAX_TASKS = 256
"""Limit on the processes and threads of one worker together."""
MAX_FILES_BYTES = 256 * 2**20
"""Limit on a worker's private folder, and on each file in it."""
MAX_SHARED_MEMORY_BYTES = 64 * 2**20
"""Limit on /dev/shm, where there is one."""
_MAX_OPEN_FILES = 1024
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 24, 38, 47, 4
_PR_SET_DUMPABLE = 4
_CAPABILITIES_3 = 0x20080522
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_DEVICES = tuple(Path("/dev") / name for name in ("null", "zero", "full", "random", "urandom"))
_ABOUT_ITSELF = tuple(Path("/proc") / name for name in ("self", "cpuinfo", "meminfo"))
_CREATE, _ADD, _RESTRICT = 444, 445, 446
"""Numbers of Landlock's three system calls, the same on every architecture."""
_ASK_VERSION = 1
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_FIRST_RIGHTS = (1 << 13) - 1
_SINCE = {2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
"""Version of the interface → the right that it added: refer, truncate, ioctl of devices."""
_TRUNCATE = 1 << 14
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | 1 << 15
_TCP_SINCE, _BIND_AND_CONNECT = 4, 0b11
_SCOPES_SINCE, _ABSTRACT_SOCKETS_AND_SIGNALS = 6, 0b11
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_WRITE = _READ | _FIRST_RIGHTS | sum(_SINCE.values())


class OverLimitError(Exception):
    """A limit was exceeded, of memory, processes or files."""


@dataclass(frozen=True, kw_only=True)
class Confinement:
    """How a process is confined. Under bubblewrap the mounts exist already, and `pieces` is not read."""

    rung: Rung
    memory_bytes: int
    scratch: Path
    pieces: tuple[tuple[Path, bool], ...] = ()
    landlock_abi: int = 0

    @staticmethod
    def of(settings: Mapping[str, Any], scratch: Path) -> Confinement:
        """Return the confinement of a process with the settings of ConfinedPython and `memory_mib`."""
        return Confinement(
            rung=settings["rung"],
            memory_bytes=settings["memory_mib"] * 2**20,
            scratch=scratch,
            pieces=tuple((Path(path), whole) for path, whole in settings["pieces"]),
            landlock_abi=settings["landlock_abi"],
        )

    def enter(self) -> None:
        """Confine this process and all that it starts, for good. Raises OSError where the kernel refuses."""
        for kind, most in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_DATA, self.memory_bytes),
            (resource.RLIMIT_FSIZE, MAX_FILES_BYTES),
            (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
            (resource.RLIMIT_MEMLOCK, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
        ):
            hard = resource.getrlimit(kind)[1]
            least = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (least, least))
        # Drop every capability, root's too, and the ways to get one back.
        libc = ctypes.CDLL(None, use_errno=True)
        _require(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
        for capability in range(64):  # fails only without the right, when there is none to drop
            libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
        header, none = struct.pack("Ii", _CAPABILITIES_3, 0), struct.pack("6I", *[0] * 6)
        _require(libc.capset(header, none), "capset")
        if self.rung == "landlock":
            rules = [(path, _READ if whole else _READ_DIR) for path, whole in self.pieces]
            rules += [(path, _READ) for path in _ABOUT_ITSELF]
            rules += [(path, _READ_FILE | _WRITE_FILE) for path in _DEVICES]
            _restrict([*rules, (self.scratch, _WRITE)], self.landlock_abi)
        refuse_system_calls(os.getpid() if self.rung == "landlock" else None)


def hide_from_others(*, hidden: bool) -> None:
    """Set whether processes of the same user may look into this one (ptrace, /proc/PID/mem, /proc/PID/fd)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, int(not hidden), 0, 0, 0)


def watch(processes: Iterable[int], memory_bytes: int) -> None:
    """Raise OverLimitError when the processes are too many, or together use too much memory."""
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


def landlock_version() -> int:
    """Return the version of the kernel's Landlock interface; 0 where there is none."""
    return max(0, int(ctypes.CDLL(None, use_errno=True).syscall(_CREATE, None, 0, _ASK_VERSION)))


def _restrict(allowed: Iterable[tuple[Path, int]], abi: int) -> None:
    """Allow the rights on each path (a folder stands for all below it) and nothing else. Skip paths that do not exist.
    `abi` is the version to use. Raises OSError where the kernel refuses."""
    handled = _FIRST_RIGHTS | sum(right for since, right in _SINCE.items() if since <= abi)
    attributes = struct.pack("Q", handled)
    if abi >= _TCP_SINCE:
        attributes += struct.pack("Q", _BIND_AND_CONNECT)
    if abi >= _SCOPES_SINCE:
        attributes += struct.pack("Q", _ABSTRACT_SOCKETS_AND_SIGNALS)
    libc = ctypes.CDLL(None, use_errno=True)
    rules = _require(libc.syscall(_CREATE, attributes, len(attributes), 0), "Landlock")
    try:
        for path, rights in allowed:
            try:
                descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                given = rights & handled
                if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                    given &= _OF_FILES
                if given:
                    rule = struct.pack("=Qi", given, descriptor)
                    _require(libc.syscall(_ADD, rules, _PATH_BENEATH, rule, 0), "Landlock")
            finally:
                os.close(descriptor)
        _require(libc.syscall(_RESTRICT, rules, 0), "Landlock")
    finally:
        os.close(rules)


def _require(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result
