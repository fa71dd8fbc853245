"""The file system of a simulation: a folder in memory, where every change is a point, and a power cut costs something.

    operations of the process that runs ──▶ point (faults) ──▶ the real folder ──▶ what is durable of it, noted
                                                                    power cut: the folder as it may be found again

What a power cut leaves is one of the outcomes that are allowed: of a file what was synced, or more of what was written
since, or a torn part of it; of a folder the entries that were synced, and any of the changes since (adversarial), or
the first of them in order (journaled, where each fsync makes all earlier changes of folders durable).
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.simulation.system import REAL
from tests.chaos.simulation.world import EPOCH_S, World

Content = bytes | None


class Cache:
    """What hosts remember of a shared file system, as NFS clients do: listings, and names that were not there.

    A host that has looked sees no newer name of another host until `visible_s` later. What it changes itself, or is
    told by the server (such a name is there already), it knows at once.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._listings: dict[tuple[str, str], tuple[float, frozenset[str]]] = {}
        """(host, folder) → when it was listed, and what was in it."""
        self._misses: dict[tuple[str, str], float] = {}
        """(host, path) → when it was not there."""

    def listed(self, folder: str, names: Sequence[str]) -> list[str]:
        """What this host sees where `names` are there."""
        me = self._world.me()
        if me.role == "operator":
            return list(names)
        key = me.host, folder
        when, known = self._listings.get(key, (-1e9, frozenset[str]()))
        if self._world.now >= when + self._world.plan.visible_s:
            self._listings[key] = self._world.now, frozenset(names)
            return list(names)
        return sorted(known)

    def look_up(self, path: str) -> None:
        """Raises FileNotFoundError where this host remembers that there is no such name."""
        me = self._world.me()
        when = self._misses.get((me.host, path))
        if when is None or me.role == "operator":
            return
        if self._world.now < when + self._world.plan.visible_s:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        del self._misses[me.host, path]

    def missed(self, path: str) -> None:
        """This host has looked, and there was none."""
        self._misses.setdefault((self._world.me().host, path), self._world.now)

    def changed(self, path: str) -> None:
        """By this host: it knows the name, and lists the folder anew."""
        host = self._world.me().host
        self._listings.pop((host, os.path.dirname(path)), None)
        while len(path) > 1:
            self._misses.pop((host, path), None)
            path = os.path.dirname(path)


@dataclass(frozen=True)
class Change:
    """Of entries of folders, at once: (folder, name, what it names from now on; None: nothing)."""

    entries: tuple[tuple[int, str, int | None], ...]

    def touches(self, folder: int) -> bool:
        return any(entry[0] == folder for entry in self.entries)


@dataclass
class Durable:
    """What a power cut cannot take. Files and folders are known by their inodes."""

    files: dict[int, Content] = field(default_factory=dict)
    folders: dict[int, dict[str, int]] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)
    removed: dict[int, bytes] = field(default_factory=dict)
    """What was in files whose last name is gone, until a power cut: they may come back."""

    def apply(self, change: Change) -> None:
        """The change can no longer be lost."""
        for folder, name, inode in change.entries:
            entries = self.folders.setdefault(folder, {})
            if inode is None:
                entries.pop(name, None)
            else:
                entries[name] = inode


class Disk:
    """Implements the calls of `os` and `io` that `system.Switch` sends here, for paths under `root`."""

    def __init__(self, world: World, root: Path) -> None:
        self.world = world
        self.root = world.root = str(root)
        self.durable = Durable()
        self.cache = Cache(world) if world.plan.visible_s else None
        self.order = world.random("listings")
        REAL.mkdir(self.root)
        self.durable.folders[self._inode(self.root)] = {}
        self.on_name: Callable[[str], None] = lambda path: None

    def holds(self, path: Any) -> bool:
        """Whether the path is this disk's business."""
        return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self.root)  # type: ignore[arg-type]

    # ---- what processes call

    def mkdir(self, path: Any, mode: int = 0o777) -> None:
        path = self._begin("mkdir", path)
        try:
            REAL.mkdir(path, mode)
        except FileExistsError:
            self._seen(path)
            raise
        self.durable.folders[self._inode(path)] = {}
        self._changed(path, self._entry(path, self._inode(path)))

    def rmdir(self, path: Any) -> None:
        path = self._begin("rmdir", path)
        REAL.rmdir(path)
        self._changed(path, self._entry(path, None))

    def unlink(self, path: Any) -> None:
        path = self._begin("unlink", path)
        self._remember(path)
        REAL.unlink(path)
        self._changed(path, self._entry(path, None))

    def link(self, source: Any, target: Any) -> None:
        self._begin("link", source)
        target = os.fspath(target)
        try:
            REAL.link(os.fspath(source), target)
        except FileExistsError:
            self._seen(target)
            raise
        self._changed(target, self._entry(target, self._inode(target)))
        self.on_name(target)

    def rename(self, source: Any, target: Any) -> None:
        source, target = self._begin("rename", source, target), os.fspath(target)
        inode = self._inode(source)
        self._remember(target)
        try:
            REAL.replace(source, target)
        except OSError:
            self._seen(target)
            raise
        self._changed(target, self._entry(source, None), self._entry(target, inode))
        self.on_name(target)

    def open(self, path: Any, mode: str, make: Callable[[], Any]) -> Any:
        """`make` opens the file, for writing or for reading."""
        path = os.fspath(path)
        if not set(mode) & set("wxa+"):
            if self.cache is not None:
                self.cache.look_up(path)
            return make()
        known = os.path.lexists(path)
        self._begin("append" if known else "create", path)
        file = make()
        if not known:
            inode = self._inode(path)
            self.durable.files[inode] = None
            self._changed(path, self._entry(path, inode))
        return file

    def write(self, descriptor: int, data: bytes) -> int:
        """A part of it is written where the process dies, or the disk gets full."""
        try:
            self._check_space("write")
            self.world.point("write", f"{len(data)} bytes")
        except BaseException:
            if not self.world.me().unwinding:
                REAL.write(descriptor, data[: random.Random(len(data)).randrange(len(data) + 1)])
            raise
        return REAL.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        path = REAL.readlink(f"/proc/self/fd/{descriptor}")
        self._begin("fsync", path)
        if stat.S_ISDIR(found.st_mode):
            self._settle(lambda change: change.touches(found.st_ino))
        else:
            with REAL.open(f"/proc/self/fd/{descriptor}", "rb") as file:
                self.durable.files[found.st_ino] = file.read()
            if self.world.plan.journaled:
                self._settle(lambda change: True)

    def listdir(self, path: Any) -> list[str]:
        path = os.fspath(path)
        self.world.point("list", self._short(path))
        names = sorted(REAL.listdir(path))
        self.order.shuffle(names)
        return names if self.cache is None else self.cache.listed(path, names)

    def stat(self, path: Any, **options: Any) -> os.stat_result:
        """Called where names may be seen late."""
        path = os.fspath(path)
        assert self.cache is not None
        self.cache.look_up(path)
        try:
            return REAL.stat(path, **options)
        except FileNotFoundError:
            self.cache.missed(path)
            raise

    # ---- what faults do

    def cut_power(self, draw: random.Random) -> None:
        """The folder as it may be found afterwards. No process lives."""
        contents, before = self._contents(), self.durable
        manner = draw.choice(("nothing", "everything", "in order" if self.world.plan.journaled else "any"))
        if manner == "in order":
            before.pending = before.pending[: draw.randrange(len(before.pending) + 1)]
        for change in before.pending:
            if manner in ("everything", "in order") or (manner == "any" and draw.random() < 0.5):
                before.apply(change)
        self.world.note("disk", "FOUND", f"{manner} of {len(before.pending)} changes")
        shutil.rmtree(self.root)
        REAL.mkdir(self.root)
        old_root = next(iter(before.folders))
        self.durable = Durable()
        if self.cache is not None:
            self.cache = Cache(self.world)  # no host was spared: none remembers what it saw before
        self._rebuild(old_root, self.root, before, contents, draw)

    def _rebuild(
        self, folder: int, path: str, before: Durable, contents: dict[int, bytes], draw: random.Random
    ) -> None:
        entries = self.durable.folders[self._inode(path)] = {}
        for name, inode in sorted(before.folders.get(folder, {}).items()):
            inner = os.path.join(path, name)
            if inode in before.folders:
                REAL.mkdir(inner)
                self._rebuild(inode, inner, before, contents, draw)
            else:
                content = _found(before.files.get(inode), contents.get(inode, b""), draw)
                with REAL.open(inner, "wb") as file:
                    file.write(content)
                self.durable.files[self._inode(inner)] = content
            entries[name] = self._inode(inner)

    def _contents(self) -> dict[int, bytes]:
        found = dict(self.durable.removed)
        for folder, _, names in os.walk(self.root):
            for name in names:
                path = os.path.join(folder, name)
                with REAL.open(path, "rb") as file:
                    found[self._inode(path)] = file.read()
        return found

    # ---- notes

    def _begin(self, operation: str, path: Any, target: Any = None) -> str:
        name = os.fspath(path)
        shown = self._short(name) + (f" → {self._short(os.fspath(target))}" if target is not None else "")
        self.world.point(operation, shown)
        if operation in ("mkdir", "create", "append", "link", "fsync"):
            self._check_space(operation)
        return name

    def _check_space(self, operation: str) -> None:
        me = self.world.me()
        if self.world.now < self.world.full_until and me.role != "operator" and not me.dead:
            self.world.note(me.name, "FULL", operation)
            self.world.counts[me.role, "refused"] += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _changed(self, path: str, *entries: tuple[int, str, int | None]) -> None:
        self.durable.pending.append(Change(entries))
        if self.cache is not None:
            self.cache.changed(path)
        folder = os.path.dirname(path)
        if folder.endswith(("batches", "evaluations", "logprobs")):  # whose times of change those who wait compare
            when = int((EPOCH_S + self.world.now) * 1e9)
            REAL.utime(folder, ns=(when, when))

    def _settle(self, which: Callable[[Change], bool]) -> None:
        settled = self.durable.pending if self.world.plan.journaled else list(filter(which, self.durable.pending))
        self.durable.pending = [change for change in self.durable.pending if change not in settled]
        for change in settled:
            self.durable.apply(change)

    def _remember(self, path: str) -> None:
        """What is in a file that is about to lose its last name."""
        try:
            found = REAL.stat(path)
        except FileNotFoundError:
            return
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
            with REAL.open(path, "rb") as file:
                self.durable.removed[found.st_ino] = file.read()

    def _seen(self, path: str) -> None:
        """This host was told that the name is there."""
        if self.cache is not None:
            self.cache.changed(path)

    def _entry(self, path: str, inode: int | None) -> tuple[int, str, int | None]:
        return self._inode(os.path.dirname(path)), os.path.basename(path), inode

    def _inode(self, path: str) -> int:
        return int(REAL.stat(path).st_ino)

    def _short(self, path: str) -> str:
        return path[len(self.root) + 1 :]


def _found(synced: Content, seen: bytes, draw: random.Random) -> bytes:
    """What a power cut leaves of a file in which `seen` was last seen."""
    if synced == seen:
        return seen
    kept = synced or b""
    torn = seen[: draw.randint(len(kept), len(seen))] if seen.startswith(kept) else kept
    return draw.choice((kept, torn, seen))
