"""Order the weight updates of engines: every update takes a number, and the highest number wins.

    RUN/policy/updates/1795331000123.json       made by exclusive creation: the role, host and kind of the update
    RUN/policy/updates/1795331000123.released   the update has ended; it holds the version that was given last

Each call of an update carries its number, and an engine refuses numbers below the highest that it has seen
(rollout_sglang.server.update_fence). So a process that froze during an update changes nothing when it goes on after its
successor. Waiting for a turn only avoids wasted work; safety never depends on it:

    while the newest update has not ended, wait; but no longer
        when a later start of its role has taken over,
        when its record has not changed for `stale_s`, by the waiting process's clock (its owner rewrites it),
        or when it resyncs single engines and a publish is to begin: the publish leaves those engines out

A number is the time in milliseconds, or the newest number plus one where clocks disagree: engines that served another
run before have seen lower numbers.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.data.checksums import create_sealed, read_sealed_json, write_sealed_json
from pipeline.data.epochs import Epoch, newest
from pipeline.data.files import NUMBER, make_folder
from pipeline.errors import DeadlineExceededError

UpdateKind = Literal["publish", "resync", "resync_single", "sleep"]
"""publish: the learner gives a new version to all engines. sleep: it has them give up their memory. resync: no engine
serves the version, and all are given it. resync_single: some engines are given the version, while others serve it."""
STALE_S = 60.0
"""Longer than file systems cache attributes (30 s are common)."""
KEPT = 8
"""Numbers whose files stay in the folder."""
_BEAT_S = 5.0
_POLL_S = 0.05
_RECORD, _RELEASED = ".json", ".released"
_FILE = re.compile(rf"({NUMBER})(\.json|\.released)")
_OWNER = re.compile(rf"(.+)-({NUMBER})")


Listing = Mapping[str, set[int]]
"""File suffix → the update numbers that have the file."""


@dataclass
class Update:
    number: int
    given: int | None
    """The version that engines were last given; set it to the version that this update gives."""


@dataclass(frozen=True)
class Updates:
    """The folder `RUN/policy/updates`, as a process uses it. `epoch` is the epoch of its role; tools have none."""

    folder: Path
    epoch: Epoch | None = None
    stale_s: float = STALE_S

    @asynccontextmanager
    async def take(self, kind: UpdateKind, patience_s: float) -> AsyncIterator[Update]:
        """Wait for a turn, and hold the newest number while the block runs. Raises DeadlineExceededError when another
        process updates for longer than `patience_s`, SupersededError when a later start of this role has taken over."""
        make_folder(self.folder)
        ends, update = time.monotonic() + patience_s, None
        while update is None:
            if self.epoch is not None:
                self.epoch.check()
            seen: tuple[int, Any] | None = None
            since = 0.0
            while (number := self.under_way()) is not None:
                record = self._read(number, _RECORD)
                if kind in ("publish", "sleep") and record.get("kind") == "resync_single":
                    break
                if (number, record) != seen:
                    seen, since = (number, record), time.monotonic()
                if time.monotonic() - since > float(record.get("stale_s", self.stale_s)):
                    break
                if time.monotonic() > ends:
                    raise DeadlineExceededError(
                        f"{record.get('role')} on {record.get('host')} has given weights to engines for more than "
                        f"{patience_s:g} s ({record.get('kind')} {number}); it is waited for again"
                    )
                await asyncio.sleep(_POLL_S)
            update = Update(max(self.newest() + 1, fresh_number()), self.given())
            try:
                create_sealed(self._path(update.number, _RECORD), json.dumps(self._record(update, kind, 0)) + "\n")
            except FileExistsError:
                update = None
        beat = asyncio.create_task(self._beat(update, kind))
        try:
            # The epoch is compared after the number was taken: a start that claims the role later takes a higher
            # number.
            if self.epoch is not None:
                self.epoch.check()
            yield update
        finally:
            beat.cancel()
            try:
                await asyncio.gather(beat, return_exceptions=True)
            finally:
                write_sealed_json(self._path(update.number, _RELEASED), dict(version=update.given))
            listed = self._listed()
            for number in sorted(listed[_RECORD] | listed[_RELEASED])[:-KEPT]:
                for suffix in (_RECORD, _RELEASED):
                    self._path(number, suffix).unlink(missing_ok=True)

    def newest(self) -> int:
        """Return the newest number; 0 when no update has begun."""
        return max(self._listed()[_RECORD], default=0)

    def settled(self) -> tuple[int, int | None] | None:
        """Return the newest number and the version that engines were given last, from a single listing; None while an
        update is under way. Engines serve that version for as long as `newest` stays the same."""
        listed = self._listed()
        if self.under_way(listed) is not None:
            return None
        return max(listed[_RECORD], default=0), self.given(listed)

    def given(self, listed: Listing | None = None) -> int | None:
        """Return the version that engines were given last; None when there was none."""
        listed = listed or self._listed()
        for number in sorted(listed[_RECORD], reverse=True):
            suffix = _RELEASED if number in listed[_RELEASED] else _RECORD
            record = self._read(number, suffix)
            if suffix == _RELEASED or record.get("version") is not None:
                version = record.get("version")
                return None if version is None else int(version)
        return None

    def under_way(self, listed: Listing | None = None) -> int | None:
        """Return the number of an unfinished update, though its process may be gone; None when there is none."""
        listed = listed or self._listed()
        number = max(listed[_RECORD], default=0)
        if not number or number in listed[_RELEASED]:
            return None
        owner = _OWNER.fullmatch(str(self._read(number, _RECORD).get("role")))
        epochs = self.folder.parent.parent / "epochs"
        is_superseded = owner is not None and newest(epochs / owner[1]) > int(owner[2])
        return None if is_superseded else number

    async def _beat(self, update: Update, kind: UpdateKind) -> None:
        """Rewrite the record regularly, as a sign of life for waiting processes."""
        beats = 0
        while True:
            await asyncio.sleep(min(_BEAT_S, self.stale_s / 4))
            beats += 1
            with suppress(OSError):  # the next one may succeed
                await asyncio.to_thread(
                    write_sealed_json, self._path(update.number, _RECORD), self._record(update, kind, beats)
                )

    def _record(self, update: Update, kind: UpdateKind, beats: int) -> dict[str, Any]:
        role = self.epoch.name if self.epoch is not None else "tool"
        record = dict(role=role, host=socket.gethostname(), kind=kind, stale_s=self.stale_s, beats=beats)
        return record | dict(version=update.given)

    def _path(self, number: int, suffix: str) -> Path:
        return self.folder / f"{number:06d}{suffix}"

    def _read(self, number: int, suffix: str) -> dict[str, Any]:
        """Return the content of a file; empty when it was pruned. Raises StoreError when it is damaged."""
        path, remedy = self._path(number, suffix), "remove it: weights are then given to engines again"
        with suppress(OSError):
            return read_sealed_json(path, remedy, is_replaced=True)
        return {}

    def _listed(self) -> Listing:
        """Read the folder in one listing: file systems may cache that a name is missing, and would hide a release."""
        found: dict[str, set[int]] = {_RECORD: set(), _RELEASED: set()}
        with suppress(FileNotFoundError):
            for name in os.listdir(self.folder):
                if match := _FILE.fullmatch(name):
                    found[match[2]].add(int(match[1]))
        return found


def fresh_number() -> int:
    """Return a number higher than all earlier ones, unless clocks disagree."""
    return time.time_ns() // 1_000_000
