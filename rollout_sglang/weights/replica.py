"""Keep a copy of a run's weights on an engine's host: made from the policy folders, and updated by deltas.

    RUN/policy/000013 ──┐
    RUN/policy/000014 ──┴─▶ REPLICA/000012-0a1b2c3d4e5f   the folder that the engine serves, or served before
                            REPLICA/000014-5f4e3d2c1b0a   the next: a copy of 12, overwritten by deltas 13 and 14

There are two folders, so that the weights which the engine loaded last are never written to. A folder's name is its
version and the digest of all its tensors. It gets the name only once every written tensor has the SHA-256 of the
version's manifest. So a delta that is damaged, missing or for other weights is detected, and nothing that a kill leaves
behind is ever loaded: the engine's next start makes a new replica.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from pipeline.child_process import make_scratch, remove_scratch
from pipeline.data.deltas import MANIFEST_FILE, STATE_DIGITS, Bytes, Link, chain_to, read_link
from pipeline.data.files import require_space, size_of, temporary_name
from pipeline.data.run_directory import RunDirectory, numbered, numbered_folders
from pipeline.errors import EvenKeelError, StoreError, SupersededError
from precision.text import one_line, parse_object, quoted
from rollout_sglang.server.start import EngineSpec

_KEPT = 2
_OF_THE_VERSION = ("SHA256SUMS", "manifest.json", "weight_check.json")
"""Files of a policy folder that describe the version; no engine reads them."""
_REMEDY = "its next whole version is taken"
_HEADER_LENGTH_BYTES = 8
MOST_HEADER_BYTES = 100_000_000
"""Limit for the header of a safetensors file, as in its library."""


def replica_name(version: int, state: str) -> str:
    """Return the name of a folder with these weights, on any host."""
    return f"{numbered(version)}-{state[:STATE_DIGITS]}"


class _Copy(NamedTuple):
    folder: Path
    link: Link


@dataclass
class Replica:
    """The folders of one engine. Not safe for several threads."""

    policies: Path
    folder: Path
    """The parent folder on the engine's host; no other process writes there."""
    on_change: Callable[[Sequence[Path]], None] = lambda _: None
    """Called with the folders, newest last, after one is added and before one is written to."""

    def __post_init__(self) -> None:
        self._held: list[_Copy] = []

    @property
    def folders(self) -> list[Path]:
        """The folders that may be loaded, newest last."""
        return [copy.folder for copy in self._held]

    def make(self, version: int) -> Path:
        """Return the folder with the weights of a version as published now, making it if missing. Raises StoreError."""
        held = {copy.link.state for copy in self._held}
        try:
            return self._make(chain_to(self.policies, version, held))
        except StoreError as error:
            try:  # from whole weights, a damaged delta may not be needed
                return self._make(chain_to(self.policies, version))
            except StoreError:
                raise error from None

    def _make(self, chain: Sequence[Link]) -> Path:
        first, last = chain[0], chain[-1]
        own = {copy.link.state: copy for copy in self._held}
        if last.state in own and own[last.state].link.version == last.version:
            self.on_change(self.folders)  # again: the first call may have failed
            return own[last.state].folder
        target = self.folder / replica_name(last.version, last.state)
        temporary = temporary_name(target)
        try:
            self._begin(first, own.get(first.state), temporary)
            changed = {name for link in chain[1:] if link.delta is not None for name in link.delta.payloads}
            for name in first.manifest.keys() | last.manifest.keys():
                old, new = (link.manifest.get(name, {}).get("sha256") for link in (first, last))
                if name not in changed and old != new:
                    raise StoreError(f"{last.folder} differs from {first.folder} in {name}, of which no delta says so")
            places = tensor_places(temporary)
            for name in sorted(changed):
                if name not in places or name not in last.manifest:
                    raise StoreError(f"{last.folder}: its deltas change {name}, which is no tensor of the model")
                data = places[name].map("r+")
                for link in chain[1:]:
                    assert link.delta is not None, "chain_to ends where there is none"
                    link.delta.overwrite(link.folder, name, data)
                if _sha256(data) != last.manifest[name]["sha256"]:
                    raise StoreError(
                        f"{name} is not as {last.folder} says, once the deltas from version {first.version} on are "
                        f"applied; {_REMEDY}"
                    )
            temporary.rename(target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._held.append(_Copy(target, last))
        self.on_change(self.folders)
        return target

    def _begin(self, first: Link, own: _Copy | None, temporary: Path) -> None:
        """Make `temporary` the weights of `first`: by reusing the oldest folder, or by a copy."""
        if len(self._held) == _KEPT:
            self.on_change(self.folders[1:])  # before it is written to: readers of the list load another
            spare = self._held.pop(0)
            spare.folder.rename(temporary)
            if spare == own:
                return
            shutil.rmtree(temporary)
        source = first.folder if own is None else own.folder
        require_space(self.folder, size_of(source), f"the engine's replica of {first.folder.name}")
        temporary.mkdir()
        for path in source.iterdir():
            if path.is_file() and not path.name.startswith("delta") and path.name not in _OF_THE_VERSION:
                shutil.copyfile(path, temporary / path.name)
        if own is None:
            places = tensor_places(temporary)
            for name, entry in first.manifest.items():
                if name not in places or _sha256(places[name].map()) != entry["sha256"]:
                    raise StoreError(f"{first.folder} does not hold tensor {name} as its manifest says; {_REMEDY}")


class TensorPlace(NamedTuple):
    file: Path
    offset: int
    num_bytes: int

    def map(self, mode: Literal["r", "r+"] = "r") -> Bytes:
        """Map the bytes into memory; with `r+`, writes go to the file."""
        if not self.num_bytes:
            return np.empty(0, np.uint8)
        return np.memmap(self.file, np.uint8, mode, self.offset, (self.num_bytes,))


def tensor_places(folder: Path) -> dict[str, TensorPlace]:
    """Return tensor name → place for a folder of safetensors. Raises StoreError."""
    found: dict[str, TensorPlace] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
                most = min(MOST_HEADER_BYTES, size - _HEADER_LENGTH_BYTES)
                if length > most:
                    raise ValueError(f"its header has {length} bytes, at most {most} are possible")
                header = parse_object(file.read(length))
            data = _HEADER_LENGTH_BYTES + length
            header.pop("__metadata__", None)
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                # Mapping a place beyond the file for writing would extend the file.
                if not (type(begin) is type(end) is int and 0 <= begin <= end <= size - data):
                    raise ValueError(
                        f"tensor {quoted(name)} lies at {quoted(begin)} to {quoted(end)} of {size - data} bytes of "
                        "values"
                    )
                found[name] = TensorPlace(path, data + begin, end - begin)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{path} is no safetensors file ({one_line(error, 200)})") from error
    return found


def _sha256(data: Bytes) -> str:
    return hashlib.sha256(data.data).hexdigest()


LOOK_S = 0.1
RETRY_S = 5.0
"""Pause before another attempt to make a replica: a file system may have shown the files late."""
_ATTEMPTS = 20


class ReplicaKeeper:
    """A thread that keeps the replica of one start of an engine up to date."""

    def __init__(self, run: RunDirectory, announce: Callable[..., None]) -> None:
        """`announce` gets `replicas`, the folders, and `stuck`, the reason why there is no newer folder
        (pipeline.data.membership.Announcement)."""
        self._run = run
        self._announce = announce
        self._folder = make_scratch("replica")
        self._replica = Replica(
            run.policies, self._folder, lambda folders: announce(replicas=tuple(map(str, folders)), stuck="")
        )
        self._seen: tuple[int, int, int] | None = None
        """The newest version and its manifest's inode and time, at the last attempt to make it."""
        self._again = 0.0
        """When to try that again, by time.monotonic."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="replica", daemon=True)

    def first(self, newest: Callable[[], EngineSpec]) -> EngineSpec:
        """Return `newest()` with the replica of its weights as model. Raises StoreError."""
        spec = newest()
        for _ in range(_ATTEMPTS):
            try:
                return replace(spec, model=self._replica.make(spec.version))
            except EvenKeelError as error:
                before, spec = spec, newest()
                if not isinstance(error, StoreError) or spec.version == before.version:
                    self.close()
                    raise  # with a newer version, the old one was deleted: try again
        self.close()
        raise StoreError(f"{spec.model}, and those before it, were deleted while they were copied; raise weights.keep")

    def begin(self) -> None:
        """Follow the run from now on, after the engine has loaded its first replica. May be called again."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Stop following, and remove the folders. May be called twice."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        remove_scratch(self._folder)

    def _follow(self) -> None:
        while not self._stop.wait(LOOK_S):
            try:
                self._look()
            except SupersededError as error:
                print(f"the replica is not kept any longer: {error}", flush=True)
                return
            except EvenKeelError as error:  # the run's file system did not answer; try again, as the role does
                print(f"warning: {error}; the replica is looked at again", flush=True)

    def _look(self) -> None:
        """Make the newest version, unless that was done."""
        with suppress(OSError, ValueError):  # ValueError: there is no version
            version = max(numbered_folders(self._run.policies))
            written = (self._run.policy_directory(version) / MANIFEST_FILE).stat()
            seen = (version, written.st_ino, written.st_mtime_ns)
            if seen == self._seen and time.monotonic() < self._again:
                return
            self._seen, self._again = seen, math.inf
            try:
                self._replica.make(version)
            except SupersededError:
                raise
            except Exception as error:  # noqa: BLE001 - after any error, nobody must wait for this replica
                self._again = time.monotonic() + RETRY_S
                why = str(error) if isinstance(error, EvenKeelError | OSError) else repr(error)
                name = numbered(version)
                with suppress(StoreError):
                    name = replica_name(version, read_link(self._run.policies, version).state)
                self._announce(stuck=f"{name}: {one_line(why, 1000)}")
