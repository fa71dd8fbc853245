"""What hosts remember of a shared file system, as NFS clients do: listings, and names that were not there.

A host that has looked sees no newer name of another host until `visible_s` later. What it changes itself, or is told by
the server (such a name is there already), it knows at once.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from tests.chaos.simulation.world import World


class Cache:
    """Of all hosts."""

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
