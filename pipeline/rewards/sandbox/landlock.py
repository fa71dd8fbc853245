"""Landlock: from here on this thread, and all that it starts, reaches only the named folders and files.

It needs no privilege and no namespace, so it works in containers that forbid both. What it does not watch (modes,
times, signals on older kernels, sockets) the filter of system calls refuses.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path

_CREATE, _ADD, _RESTRICT = 444, 445, 446
"""Numbers of the three system calls, the same on every architecture."""
_ASK_VERSION = 1
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_FIRST_RIGHTS = (1 << 13) - 1
_SINCE = {2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
"""Version of the interface → a right that it added: refer, truncate, ioctl of devices."""
_TRUNCATE = 1 << 14
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | 1 << 15
_TCP_SINCE, _BIND_AND_CONNECT = 4, 0b11
_SCOPES_SINCE, _ABSTRACT_SOCKETS_AND_SIGNALS = 6, 0b11

READ = _EXECUTE | _READ_FILE | _READ_DIR
LIST = _READ_DIR
WRITE = READ | _FIRST_RIGHTS | sum(_SINCE.values())
USE_DEVICE = _READ_FILE | _WRITE_FILE


def version() -> int:
    """Of the kernel's interface; 0 where there is none."""
    return max(0, int(ctypes.CDLL(None, use_errno=True).syscall(_CREATE, None, 0, _ASK_VERSION)))


def restrict(allowed: Iterable[tuple[Path, int]], abi: int) -> None:
    """Allow the rights on each path (a folder stands for all below it) and nothing else. `abi` is the version to use.

    A path that does not exist is left out. Raises OSError where the kernel refuses.
    """
    handled = _FIRST_RIGHTS | sum(right for since, right in _SINCE.items() if since <= abi)
    attributes = struct.pack("Q", handled)
    if abi >= _TCP_SINCE:
        attributes += struct.pack("Q", _BIND_AND_CONNECT)
    if abi >= _SCOPES_SINCE:
        attributes += struct.pack("Q", _ABSTRACT_SOCKETS_AND_SIGNALS)
    rules = _call(_CREATE, attributes, len(attributes), 0)
    try:
        for path, rights in allowed:
            _allow(rules, path, rights & handled)
        _call(_RESTRICT, rules, 0)
    finally:
        os.close(rules)


def _allow(rules: int, path: Path, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _OF_FILES
        if rights:
            _call(_ADD, rules, _PATH_BENEATH, struct.pack("=Qi", rights, descriptor), 0)
    finally:
        os.close(descriptor)


def _call(number: int, *arguments: int | bytes) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return result
