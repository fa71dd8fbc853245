"""The command that runs a program under bubblewrap: namespaces of its own (user, processes, network, mounts, IPC), a
file system that shows the view and nothing else, read-only but for a small /tmp in memory.

    home/             a folder of its own, empty but for what is mounted there
    home/project/     the user's folder of this name, as it is at every moment
    home/table.json   the user's file, the one that is there at the start
    home/.ssh         nothing, and nothing will be: it was not mounted
    home/runs         nothing: it holds a run
    home/judge/       holds the key, so again a folder of its own; home/judge/key is not mounted

A mount over what is hidden would not do. It goes with the file that it lies on, and files are replaced while a worker
lives: the key, `.env` by an editor.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pipeline.rewards.sandbox.limits import MAX_FILES_BYTES, MAX_SHARED_MEMORY_BYTES
from pipeline.rewards.sandbox.view import View, entries

PROGRAM = "bwrap"
MOST_MOUNTS = 1500
"""Each takes longer than the one before it: 500 about a second together, these some 15 seconds at every start."""
_Option = tuple[str, ...]
_FOLDER: _Option = ("--perms", "0555", "--tmpfs")


class Bubblewrap:
    """Shows of a view what is there when this is made, to every process that is started under it: what comes later
    beside it is not shown, so it cannot take more mounts than at first."""

    def __init__(self, view: View) -> None:
        """Raises OSError where the view takes more than MOST_MOUNTS."""
        mounts = _mounts(view)
        if (problem := _too_many(mounts, MOST_MOUNTS)) is not None:
            raise OSError(errno.E2BIG, problem)
        self._view, self._paths = view, frozenset(mounts)

    def command(self, command: Sequence[str]) -> list[str]:
        """`command` in the sandbox, as process 1 there: the others cannot signal it, and die with it."""
        # Looked at anew: a file may have become a link since, perhaps to what is hidden.
        mounts = {path: option for path, option in _mounts(self._view).items() if path in self._paths}
        return _command(command, mounts)


def too_many_mounts(view: View, most: int) -> str | None:
    """Why it takes more than `most` mounts to show the view; None where it does not."""
    return _too_many(_mounts(view), most)


def _too_many(mounts: Mapping[Path, _Option], most: int) -> str | None:
    if len(mounts) <= most:
        return None
    ((fullest, count),) = Counter(path.parent for path in mounts).most_common(1)
    return (
        f"{fullest} holds {count} files and folders, and bubblewrap can show at most {most} one by one; "
        "move them into a folder there, or give the command in another one"
    )


def _command(command: Sequence[str], mounts: Mapping[Path, _Option]) -> list[str]:
    arguments = ["--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    arguments += ["--size", str(MAX_FILES_BYTES), "--tmpfs", "/tmp"]
    for path in sorted(mounts, key=lambda path: (len(path.parts), path)):  # what is deeper lies on top
        arguments += [*mounts[path], str(path)]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--size", str(MAX_SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm"]
    for path in (*(path for path, option in mounts.items() if option == _FOLDER), Path("/dev"), Path("/")):
        arguments += ["--remount-ro", str(path)]
    return [shutil.which(PROGRAM) or PROGRAM, *arguments, "--chdir", "/", "--", *command]


def _mounts(view: View) -> dict[Path, _Option]:
    """Path → bubblewrap's option that puts there what is to be seen."""
    roots, below = dict[Path, _Option](), dict[Path, _Option]()
    for root in view.system:
        real = root.resolve()
        carved = dict(_carve(real, view.hidden, dots=True))
        if carved == {real: _shown(real)}:
            roots[root] = _shown(root)
        elif carved:
            below |= carved if root == real else carved | {root: ("--symlink", str(real))}
    for root in view.own:
        carved = dict(_carve(root, view.hidden, dots=False))
        roots |= {path: option for path, option in carved.items() if path == root}
        below |= carved
    # Where something is mounted below a link, folders take its place.
    above = {folder for root in roots for folder in root.parents}
    return {path: option for path, option in below.items() if path not in above or option[0] != "--symlink"} | roots


def _carve(path: Path, hidden: Sequence[Path], *, dots: bool) -> Iterator[tuple[Path, _Option]]:
    """What shows `path`, a real path or a link in a real folder, without what is hidden; without `dots`, also without
    its entries that begin with one. A link stays a link: it leads to what is shown, or nowhere."""
    if any(path.is_relative_to(one) for one in hidden):
        return
    if path.is_symlink():
        yield path, ("--symlink", os.readlink(path))
    elif path.is_dir() and (not dots or any(one.is_relative_to(path) for one in hidden)):
        yield path, _FOLDER
        for entry in entries(path):
            if dots or not entry.name.startswith("."):
                yield from _carve(entry, hidden, dots=True)
    else:
        yield path, _shown(path)


def _shown(path: Path) -> _Option:
    """As it is; it may be gone when bubblewrap comes to it."""
    return ("--ro-bind-try", str(path))
