"""Record the engines and the router of a run, and their addresses: `RUN/engines/`.

    RUN/engines/000003.json   engine 3, announced by the process that runs it, which removes it when it ends
    RUN/engines/router.json

Each file has one writer, so engines join and leave without agreeing on anything. A listed engine gets no request before
the fleet (rollout_sglang.fleet) has verified it. No API key is stored here.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.data.checksums import read_sealed_json, write_sealed_json
from pipeline.data.files import NUMBER, make_folder
from pipeline.errors import StoreError
from precision.settings import problem_of

_FILE = re.compile(rf"({NUMBER})\.json")
_ROUTER = "router.json"
_log = logging.getLogger(__name__)


MOST_INDEX = (1 << 16) - 2
"""The highest index: batches store it in 16 bits, and the highest value stands for an unknown engine."""


class _Announcement(BaseModel):
    """A file of the folder, possibly written by a person or by another version."""

    model_config = ConfigDict(strict=True, extra="ignore")

    url: str = Field(pattern=r"^https?://[^\s/?#]{1,500}[^\s?#]{0,500}$")
    started: int = Field(0, ge=0, lt=1 << 53)
    quant_map: str = Field("", max_length=200)
    silent: str = Field("", max_length=5000)
    replicas: list[str] = Field([], max_length=8)
    stuck: str = Field("", max_length=5000)


@dataclass(frozen=True, order=True)
class Member:
    """An engine of a run."""

    index: int
    url: str
    started: int = 0
    """The number of the engine's start (pipeline.data.epochs); each start must be verified."""
    quant_map: str = ""
    """Digest of the quant map that it was started with (pipeline.data.quant_maps); empty for none."""
    silent: str = field(default="", compare=False)
    """The reason why its role considers its server hung, else empty. It does not distinguish starts."""
    replicas: tuple[str, ...] = field(default=(), compare=False)
    """The folders on its host with a version each, newest last, that it loads; empty: it loads published folders."""
    stuck: str = field(default="", compare=False)
    """`NAME: REASON` of a replica that cannot be made."""


@dataclass(frozen=True)
class Membership:
    """The folder `RUN/engines`. With `given` URLs (rollout.urls), these are the engines, however started."""

    folder: Path
    given: tuple[str, ...] = ()

    def announce(self, member: Member) -> None:
        """Announce an engine that answers at its URL, or its changes."""
        make_folder(self.folder)
        told: dict[str, Any] = dict(
            url=member.url,
            started=member.started,
            quant_map=member.quant_map,
            silent=member.silent,
            replicas=list(member.replicas),
            stuck=member.stuck[:5000],
        )
        write_sealed_json(self.folder / f"{member.index:06d}.json", told)

    def withdraw(self, member: Member) -> None:
        """Remove an engine's announcement, unless a later start has replaced it."""
        if self.lists(member):
            (self.folder / f"{member.index:06d}.json").unlink(missing_ok=True)

    def announce_router(self, url: str) -> None:
        make_folder(self.folder)
        write_sealed_json(self.folder / _ROUTER, dict(url=url))

    def withdraw_router(self, url: str) -> None:
        """Remove the router's announcement, unless another router has replaced it."""
        if self.router() == url:
            (self.folder / _ROUTER).unlink(missing_ok=True)

    def lists(self, member: Member) -> bool:
        """Return whether this start of the engine is announced."""
        return self.engine(member.index) == member

    def engine(self, index: int) -> Member | None:
        """Return engine `index` if it is announced, or None. The others' announcements are not read."""
        return self._read(f"{index:06d}.json")

    def engines(self) -> Sequence[Member]:
        """Return all announced engines, by index."""
        if self.given:
            return [Member(index, url) for index, url in enumerate(self.given)]
        names = sorted(path.name for path in self.folder.glob("*.json")) if self.folder.is_dir() else []
        found = (self._read(name) for name in names if _FILE.fullmatch(name))
        return sorted(member for member in found if member is not None)

    def router(self) -> str | None:
        """Return the router's URL, or None."""
        data = self._load(_ROUTER)
        return None if data is None else data.url

    def _read(self, name: str) -> Member | None:
        found, index = self._load(name), int(Path(name).stem)
        if found is None:
            return None
        if index > MOST_INDEX:
            raise StoreError(f"{self.folder / name} is engine {index}, expected at most {MOST_INDEX}; remove it")
        replicas = tuple(found.replicas)
        return Member(index, found.url, found.started, found.quant_map, found.silent, replicas, found.stuck)

    def _load(self, name: str) -> _Announcement | None:
        """Read a file; None for one that stays damaged: its process rewrites it, and other engines are unaffected."""
        path = self.folder / name
        remedy = "its process announces itself again; remove it where that is gone"
        with suppress(FileNotFoundError):
            try:
                return _Announcement.model_validate(read_sealed_json(path, remedy, is_replaced=True))
            except ValidationError as error:
                _log.warning("%s is damaged (%s); %s", path, problem_of(error), remedy)
            except StoreError as error:
                _log.warning("%s", error)
        return None


class Announcement:
    """The announcement of one start of an engine. Threads may change it; nothing is written before `say`."""

    def __init__(self, membership: Membership, member: Member, fence: Callable[[], None]) -> None:
        """`fence` raises where a later start has taken over."""
        self.member = member
        self._membership = membership
        self._fence = fence
        self._is_up = False
        self._lock = threading.Lock()

    def say(self, **fields: Any) -> None:
        """Announce the engine, with new values of these fields of Member. A repetition restores a lost file."""
        self._is_up = True
        self.change(**fields)

    def withdraw(self) -> None:
        """Remove the announcement for good: later changes are not written."""
        with self._lock:
            self._is_up = False
            self._membership.withdraw(self.member)

    def change(self, **fields: Any) -> None:
        """Change these fields, and write them if the engine is announced."""
        with self._lock:
            self.member = replace(self.member, **fields)
            if self._is_up:
                self._fence()
                self._membership.announce(self.member)


REREAD_S = 10.0
"""How long the folder's modification time is trusted: shared file systems may show an old one."""
_SETTLED_S = 2.0
"""A folder changed more recently may change again within the resolution of its modification time."""


class Listed:
    """A membership's engines for frequent callers: files are opened only when the folder has changed. Thread-safe."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._read: tuple[int, float, Sequence[Member]] | None = None
        """The folder's modification time in ns, the time of reading (time.monotonic), and the engines."""

    def engines(self) -> Sequence[Member]:
        """Return `Membership.engines`, at most REREAD_S old."""
        try:
            changed = self._membership.folder.stat().st_mtime_ns
        except FileNotFoundError:
            return self._membership.engines()
        known, now = self._read, time.monotonic()
        if known is not None and known[0] == changed and now - known[1] < REREAD_S:
            return known[2]
        engines = self._membership.engines()
        settled = abs(time.time() - changed / 1e9) > _SETTLED_S
        self._read = (changed, now, engines) if settled else None
        return engines
