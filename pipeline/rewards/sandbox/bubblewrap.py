"""The command that runs a program under bubblewrap: namespaces of its own (user, processes, network, mounts, IPC), a
file system that shows the view and nothing else, read-only but for a small /tmp in memory."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from pipeline.rewards.sandbox.limits import MAX_FILES_BYTES, MAX_SHARED_MEMORY_BYTES
from pipeline.rewards.sandbox.view import View

PROGRAM = "bwrap"


def bubblewrap_command(command: Sequence[str], view: View) -> list[str]:
    """`command` in the sandbox, as process 1 there: the others cannot signal it, and die with it."""
    arguments = ["--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    arguments += ["--size", str(MAX_FILES_BYTES), "--tmpfs", "/tmp"]
    empty = []
    for path, shown in _mounts(view):
        if shown:
            arguments += ["--ro-bind", str(path), str(path)]
        elif path.is_dir():
            arguments += ["--perms", "0555", "--size", "4096", "--tmpfs", str(path)]
            empty.append(path)
        else:
            arguments += ["--ro-bind", "/dev/null", str(path)]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--size", str(MAX_SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm"]
    for path in (*empty, Path("/dev"), Path("/")):
        arguments += ["--remount-ro", str(path)]
    return [shutil.which(PROGRAM) or PROGRAM, *arguments, "--chdir", "/", "--", *command]


def _mounts(view: View) -> list[tuple[Path, bool]]:
    """(path, shown?) in the order of mounting: what is deeper later, so that it lies on top of what is above it; what
    is hidden for good last of all."""
    shown = {path: True for path in (*view.system, *view.own)}
    mounts = {path: False for path in view.dotted()} | shown
    ordered = sorted(mounts.items(), key=lambda item: (len(item[0].parts), item[0]))
    hidden = [path for path in view.hidden if path.exists() and any(path.is_relative_to(root) for root in shown)]
    return [*ordered, *((path, False) for path in sorted(hidden))]
