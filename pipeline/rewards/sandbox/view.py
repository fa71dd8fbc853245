"""Determine what code in the sandbox can read: the system, this Python and, for a reward function, the user's folders.

All else is hidden, above all the run directory, other runs beside it and the file of the API key. A command may be
given in a home folder, so entries like .ssh, .git and .env are hidden in the user's folders, not deeper down.
"""

from __future__ import annotations

import errno
import importlib.machinery
import os
import pwd
import shutil
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.rewards.sandbox.confine import MAX_FILES_BYTES, MAX_SHARED_MEMORY_BYTES

PACKAGE = Path(__file__).resolve().parents[2]
"""Our package `pipeline`. Parts of it run in the sandbox, as do parts of `precision` beside it."""

_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/alternatives", "/etc/localtime"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf"),
    *("/etc/mime.types", "/sys/devices/system/cpu"),
)
_OF_PREFIX = ("bin", "lib", "lib64", "pyvenv.cfg")
"""Entries of Python's installation folder that Python needs."""
_TOO_WIDE = frozenset(Path(path) for path in ("/", "/etc", "/proc", "/sys", "/dev", "/home", "/var", "/run"))
"""Folders that are never taken for a user's own."""


@dataclass(frozen=True, kw_only=True)
class View:
    """Folders to show: `system` whole, `own` without entries that begin with a dot, both without what is `hidden`. All
    paths are absolute, without symbolic links in `own` and `hidden`."""

    system: tuple[Path, ...]
    own: tuple[Path, ...] = ()
    hidden: tuple[Path, ...] = ()

    def pieces(self) -> list[tuple[Path, bool]]:
        """Return (path, with all below it?) pairs that together show the view, for a sandbox that can only allow. A
        folder with hidden contents is listed without what is below it."""
        found = [piece for root in self.system for piece in self._carve(root.resolve(), dots=True)]
        return found + [piece for root in self.own for piece in self._carve(root, dots=False)]

    def shows(self, path: Path) -> bool:
        """Return whether a folder can be entered at this path."""
        inside = any(path.is_relative_to(root) for root in (*self.system, *self.own))
        return inside and not any(path.is_relative_to(hidden) for hidden in self.hidden)

    def _carve(self, root: Path, *, dots: bool) -> Iterator[tuple[Path, bool]]:
        if any(root.is_relative_to(hidden) for hidden in self.hidden):
            return
        if dots and not any(hidden.is_relative_to(root) for hidden in self.hidden):
            yield root, True
            return
        yield root, False
        for entry in entries(root):
            real = entry.resolve()
            inside = real.relative_to(root).parts if real.is_relative_to(root) else ()
            # Skip an entry that begins with a dot, a link to a path below one, and a link to the folder or above it.
            if not dots and (root.is_relative_to(real) or any(name.startswith(".") for name in (entry.name, *inside))):
                continue
            if not any(hidden.is_relative_to(real) for hidden in self.hidden):
                if not any(real.is_relative_to(hidden) for hidden in self.hidden):
                    yield real, True
            elif not entry.is_symlink():  # a link to a folder above the run would show all that lies beside it
                yield from self._carve(real, dots=True)


def view_of(reward: str, hidden: Iterable[Path], *, own: bool, runs: Path | None = None) -> View:
    """Return the view for the reward function `package.module:function`. Without `own` it is only the system and
    Python: a program that a model wrote must not find the answers in the user's folder. `runs`, the folder that holds
    the run, is hidden too, unless it is, or holds, a folder that is shown."""
    system = [Path(path) for path in _SYSTEM if os.path.exists(path)]
    # Folders of installed packages, the user's own too, by the real paths by which they are imported.
    searched = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path)
    packages = [
        os.path.realpath(one) for one in searched if os.path.basename(one) in ("site-packages", "dist-packages")
    ]
    # This interpreter, every link on the way to it, and the folders that it imports from.
    prefixes = sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix
    folders = [path for path in (*sysconfig.get_paths().values(), *packages) if os.path.isdir(path)]
    for python in (*prefixes, *folders):
        system += _without_home(Path(python))
    link = Path(sys.executable)
    while link.is_symlink():
        link = link.parent / link.readlink()
        system.append(link if _is_wide(link.parent) else link.parent)
    system += [PACKAGE, PACKAGE.with_name("precision")]
    mine = [*_own(reward)] if own else []
    installed = [path for prefix in (sys.prefix, sys.base_prefix, "/usr") for path in _without_home(Path(prefix))]
    inside = [path.resolve() for path in (*map(Path, packages), *installed)]
    mine = [path for path in mine if not any(path.is_relative_to(p) for p in inside)]
    kept = [path.resolve() for path in hidden]
    if runs is not None:
        shown = [*system, *(path.resolve() for path in system), *mine]
        folder = runs.resolve()
        kept += [] if any(path.is_relative_to(folder) for path in shown) else [folder]
    return View(system=tuple(dict.fromkeys(system)), own=tuple(dict.fromkeys(mine)), hidden=tuple(kept))


def _without_home(prefix: Path) -> Iterator[Path]:
    """Yield a folder of this Python; only the needed parts if a home folder lies in it, as after `python -m venv ~`."""
    if _is_wide(prefix):
        yield from (prefix / name for name in _OF_PREFIX if (prefix / name).exists())
    else:
        yield prefix


def _is_wide(folder: Path) -> bool:
    """Return whether a folder holds keys and other things of the user that have nothing to do with Python."""
    real, homes = folder.resolve(), [Path(os.path.expanduser("~")).resolve()]
    with suppress(KeyError):  # a container may run as a user whom nobody has named
        homes.append(Path(pwd.getpwuid(os.getuid()).pw_dir).resolve())
    return real in _TOO_WIDE or any(home.is_relative_to(real) for home in homes)


def _own(reward: str) -> Iterator[Path]:
    """Yield the working directory, the folders on the path, and the folder of the reward's top package (an editable
    install may be on no path), which is found without importing it."""
    candidates = [os.getcwd(), *sys.path]
    top = reward.partition(":")[0].partition(".")[0]
    for finder in sys.meta_path:
        try:
            spec: importlib.machinery.ModuleSpec | None = finder.find_spec(top, None)
        except Exception:  # noqa: BLE001 - a foreign finder; the import in the sandbox reports the error
            continue
        if spec is not None:
            candidates += spec.submodule_search_locations or []
            if spec.origin and os.path.isabs(spec.origin):
                candidates.append(os.path.dirname(spec.origin))
            break
    for candidate in candidates:
        path = Path(candidate or os.getcwd()).resolve()
        if path.exists() and path not in _TOO_WIDE:
            yield path


def entries(folder: Path) -> list[Path]:
    """Return the sorted contents of a folder; none where it cannot be listed."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


PROGRAM = "bwrap"
MOST_MOUNTS = 1500
"""Limit on mounts. Each takes longer than the last: 500 about a second, this many some 15 seconds at every start."""
_Option = tuple[str, ...]
_FOLDER: _Option = ("--perms", "0555", "--tmpfs")


class Bubblewrap:
    """The part of a view that exists when this is created, for every process started under it. Later files beside it
    are not shown, so the number of mounts cannot grow."""

    def __init__(self, view: View, most: int = MOST_MOUNTS) -> None:
        """Take the mounts of a view. Raises OSError for more than `most`."""
        mounts = _mounts(view)
        if len(mounts) > most:
            ((fullest, count),) = Counter(path.parent for path in mounts).most_common(1)
            raise OSError(
                errno.E2BIG,
                f"{fullest} holds {count} files and folders, and bubblewrap can show at most {most} one by one; "
                "move them into a folder there, or give the command in another one",
            )
        self._view, self._paths = view, frozenset(mounts)

    def command(self, command: Sequence[str]) -> list[str]:
        """Return `command` wrapped in the sandbox, as process 1 there: the others cannot signal it, and die with it."""
        # Compute the mounts again: a file may have become a link since, perhaps to a hidden path.
        mounts = {path: option for path, option in _mounts(self._view).items() if path in self._paths}
        arguments = ["--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
        arguments += ["--size", str(MAX_FILES_BYTES), "--tmpfs", "/tmp"]
        for path in sorted(mounts, key=lambda path: (len(path.parts), path)):  # deeper mounts lie on top
            arguments += [*mounts[path], str(path)]
        arguments += ["--proc", "/proc", "--dev", "/dev", "--size", str(MAX_SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm"]
        for path in (*(path for path, option in mounts.items() if option == _FOLDER), Path("/dev"), Path("/")):
            arguments += ["--remount-ro", str(path)]
        return [shutil.which(PROGRAM) or PROGRAM, *arguments, "--chdir", "/", "--", *command]


def _mounts(view: View) -> dict[Path, _Option]:
    """Return path → the bubblewrap option that shows it."""
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
    """Yield the mounts that show `path`, a real path or a link in a real folder, without what is hidden; without
    `dots`, also without its entries that begin with a dot. A link stays a link."""
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
    """Return the option that shows a path as it is; it may be gone when bubblewrap gets there."""
    return ("--ro-bind-try", str(path))
