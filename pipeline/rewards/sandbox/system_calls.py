"""Refuse system calls to code in the sandbox, by a seccomp filter.

    architecture ─▶ number above those we know ─▶ refused outright ─▶ refused by an argument ─▶ allowed

The filter is classic BPF, written here because libseccomp is a system package and has no rule for all numbers above a
given one. Refused calls fail with EPERM. Calls newer than this table fail with ENOSYS, as on an older kernel.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from typing import NamedTuple

_NEWEST = 450
"""Highest number of Linux 5.17. Higher numbers are refused (on x86_64 that includes the x32 calls)."""
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def _numbers(*groups: str) -> dict[str, tuple[int | None, int | None]]:
    """Parse `name x86_64 aarch64, …`; a dash means that there is no such call."""
    calls = (call.split() for group in groups for call in group.split(", "))
    return {name: (None if x86 == "-" else int(x86), None if arm == "-" else int(arm)) for name, x86, arm in calls}


_REFUSED = _numbers(
    # other processes
    "ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440, "
    "process_mrelease 448 448, pidfd_getfd 438 438, kcmp 312 272, migrate_pages 256 238, move_pages 279 239",
    # the network; socketpair stays allowed
    "socket 41 198",
    # memory that no limit counts, and what outlives a process
    "memfd_create 319 279, memfd_secret 447 447, shmget 29 194, shmat 30 196, shmctl 31 195, msgget 68 186, "
    "msgsnd 69 189, msgrcv 70 188, msgctl 71 187, semget 64 190, semop 65 193, semctl 66 191, "
    "semtimedop 220 192, mq_open 240 180, mq_unlink 241 181, keyctl 250 219, add_key 248 217, "
    "request_key 249 218",
    # ways around the filter, and wide doors into the kernel
    "io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, bpf 321 280, "
    "perf_event_open 298 241, userfaultfd 323 282, modify_ldt 154 -, iopl 172 -, ioperm 173 -, "
    "personality 135 92, syslog 103 116, lookup_dcookie 212 18, nfsservctl 180 42",
    # other views of the file system
    "mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, unshare 272 97, setns 308 268, "
    "open_tree 428 428, move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433, "
    "mount_setattr 442 442, open_by_handle_at 304 265, name_to_handle_at 303 264, fanotify_init 300 262, "
    "quotactl 179 60, quotactl_fd 443 443",
    # the machine
    "swapon 167 224, swapoff 168 225, reboot 169 142, kexec_load 246 104, kexec_file_load 320 294, "
    "init_module 175 105, finit_module 313 273, delete_module 176 106, acct 163 89, settimeofday 164 170, "
    "clock_settime 227 112, clock_adjtime 305 266, adjtimex 159 171, vhangup 153 58, sethostname 170 161, "
    "setdomainname 171 162",
)
"""Calls refused on every rung: name → number on (x86_64, aarch64)."""

_REFUSED_WITHOUT_NAMESPACES = _numbers(
    # processes: without a PID namespace nobody could end all of a fork bomb
    "fork 57 -, vfork 58 -",
    # signals to, and priorities of, processes of the same user
    "tkill 200 130, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, pidfd_send_signal 424 424, ioprio_set 251 30",
    # what Landlock does not watch: modes, owners, times, attributes, and on old kernels lengths
    "chmod 90 -, fchmod 91 52, fchmodat 268 53, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54, "
    "utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88, setxattr 188 5, lsetxattr 189 6, "
    "fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, truncate 76 45",
)

_NOT_THERE: dict[str, tuple[int | None, int | None]] = {"clone3": (435, 435), "openat2": (437, 437)}
"""Calls whose arguments lie in memory, where a filter cannot look. On ENOSYS, C libraries use the older calls."""


class _When(NamedTuple):
    """A rule to refuse a call where `argument & mask` is (or, with `unless`, is not) `value`."""

    numbers: tuple[int | None, int | None]
    argument: int
    mask: int
    value: int
    unless: bool = False


_CLONE, _MMAP, _OPEN, _OPENAT = (56, 220), (9, 222), (2, None), (257, 56)
_KILL, _TGKILL, _FCNTL, _IOCTL, _PRLIMIT = (62, 129), (234, 131), (72, 25), (16, 29), (302, 261)
_SETPRIORITY = (141, 140)
_SCHEDULING: tuple[tuple[int | None, int | None], ...] = ((203, 122), (144, 119), (142, 118), (314, 274))
_NAMESPACE_FLAGS = (0x00000080, 0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
_CLONE_THREAD = 0x00010000
_SHARED_ANONYMOUS = 0x21
_ALL = 0xFFFFFFFF
_SIGNAL_OWNERS, _SIGNAL_OWNER_REQUESTS = (8, 15), (0x8901, 0x8902, 0x5412)
"""fcntl's F_SETOWN and F_SETOWN_EX, ioctl's FIOSETOWN, SIOCSPGRP and TIOCSTI: ways to send a signal, or keys."""
_WAYS_TO_SHORTEN = ((os.O_TRUNC | os.O_ACCMODE, os.O_TRUNC | os.O_RDONLY), (os.O_ACCMODE, os.O_ACCMODE))
"""O_TRUNC shortens what is opened for reading, too. Access mode 3 opens for neither reading nor writing, so that
Landlock before version 3 asks for no right at all."""


_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _AND, _RETURN = 0x20, 0x15, 0x25, 0x54, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_ALLOW = 0x7FFF0000
_PERMISSION, _MISSING = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_INSTRUCTION = struct.Struct("HBBI")


def program(own_pid: int | None, machine: str | None = None) -> bytes:
    """Return the filter. With `own_pid` (outside a PID namespace) the process may start no process, and signal only
    itself. Raises OSError on a machine that the table does not know."""
    machine = machine or platform.machine()
    if machine not in _AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}, only for {', '.join(_AUDIT_ARCH)}")
    column = list(_AUDIT_ARCH).index(machine)
    # Jumps are relative: (code, jump if true, jump if false, constant).
    made = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _PERMISSION),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_ABOVE, 0, 1, _NEWEST),
        (_RETURN, 0, 0, _MISSING),
    ]
    refused = _REFUSED if own_pid is None else _REFUSED | _REFUSED_WITHOUT_NAMESPACES
    for calls, answer in ((refused, _PERMISSION), (_NOT_THERE, _MISSING)):
        for numbers in calls.values():
            if (number := numbers[column]) is not None:
                made += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, answer)]
    conditions = [_When(_CLONE, 0, flag, flag) for flag in _NAMESPACE_FLAGS]
    conditions.append(_When(_MMAP, 3, _SHARED_ANONYMOUS, _SHARED_ANONYMOUS))
    conditions += [_When(numbers, 0, _ALL, 0, unless=True) for numbers in (_PRLIMIT, *_SCHEDULING)]
    conditions += [_When(_SETPRIORITY, argument, _ALL, 0, unless=True) for argument in (0, 1)]
    if own_pid is not None:
        conditions.append(_When(_CLONE, 0, _CLONE_THREAD, 0))
        conditions += [_When(numbers, 0, _ALL, own_pid, unless=True) for numbers in (_KILL, _TGKILL)]
        conditions += [_When(_FCNTL, 1, _ALL, request) for request in _SIGNAL_OWNERS]
        conditions += [_When(_IOCTL, 1, _ALL, request) for request in _SIGNAL_OWNER_REQUESTS]
        for mask, value in _WAYS_TO_SHORTEN:
            conditions += [_When(_OPEN, 1, mask, value), _When(_OPENAT, 2, mask, value)]
    for when in conditions:
        if (number := when.numbers[column]) is not None:
            # Compare the low half of the argument: flags, pids and requests have 32 bits.
            on_equal, on_other = (1, 0) if when.unless else (0, 1)
            made += [
                (_JUMP_EQUAL, 0, 5, number),
                (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * when.argument),
                (_AND, 0, 0, when.mask),
                (_JUMP_EQUAL, on_equal, on_other, when.value),
                (_RETURN, 0, 0, _PERMISSION),
                (_LOAD, 0, 0, _NUMBER_AT),
            ]
    made.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in made)


_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2


def refuse_system_calls(own_pid: int | None) -> None:
    """Put this thread, and all that it starts, under the filter for good. It must have set no_new_privs before. Raises
    OSError where the kernel has no seccomp."""
    filter_ = program(own_pid)
    buffer = ctypes.create_string_buffer(filter_, len(filter_))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    loaded = Program(len(filter_) // _INSTRUCTION.size, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(loaded), 0, 0):
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")
