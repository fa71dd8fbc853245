"""Keeps an engine's replica of the weights at the newest version, in a thread beside its server.

    RUN/policy/000014 appears ─▶ Replica.make ─▶ announced ─▶ whoever gives the engine version 14 has it loaded

What cannot be made is announced, too, so that nobody waits for it: the learner then publishes the next version whole.
The folders lie among the temporary files of this host (TMPDIR), twice the weights, and are removed with the role.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pipeline.child_process import make_scratch, remove_scratch
from pipeline.data.deltas import MANIFEST_FILE, read_link
from pipeline.data.run_directory import RunDirectory, numbered, numbered_folders
from pipeline.errors import EvenKeelError, StoreError, SupersededError
from precision.text import one_line
from rollout_sglang.server.start import EngineSpec
from rollout_sglang.weights.replica import Replica, replica_name

LOOK_S = 0.1
RETRY_S = 5.0
"""How often it is tried again to make what could not be made: a file system may have shown it late."""
_ATTEMPTS = 20


class ReplicaKeeper:
    """Of one start of an engine."""

    def __init__(self, run: RunDirectory, announce: Callable[..., None]) -> None:
        """`announce` is told `replicas`, the folders, and `stuck`, why there is no newer one
        (pipeline.data.membership.Announcement)."""
        self._run = run
        self._announce = announce
        self._folder = make_scratch("replica")
        self._replica = Replica(run.policies, self._folder, self._changed)
        self._seen: tuple[int, int, int] | None = None
        """The newest version, and which file its manifest was, when it was made or tried last."""
        self._again = 0.0
        """When that is tried again, by time.monotonic."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="replica", daemon=True)

    def first(self, newest: Callable[[], EngineSpec]) -> EngineSpec:
        """`newest()`, with the replica of its weights. Raises StoreError."""
        spec = newest()
        for _ in range(_ATTEMPTS):
            try:
                return replace(spec, model=self._replica.make(spec.version))
            except EvenKeelError as error:
                before, spec = spec, newest()
                if not isinstance(error, StoreError) or spec.version == before.version:
                    self.close()
                    raise  # or else the old policy was deleted meanwhile
        self.close()
        raise StoreError(f"{spec.model}, and those before it, were deleted while they were copied; raise weights.keep")

    def begin(self) -> None:
        """Follow the run from now on: the engine has loaded its first replica. May be called again."""
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
            except EvenKeelError as error:  # the run's file system did not answer; the role goes on as well
                print(f"warning: {error}; the replica is looked at again", flush=True)

    def _look(self) -> None:
        """Make the newest version, unless that was done."""
        with suppress(OSError, ValueError):  # ValueError: there is none
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
            except Exception as error:  # noqa: BLE001 - whatever it is, nobody must wait for this replica
                self._again = time.monotonic() + RETRY_S
                why = str(error) if isinstance(error, EvenKeelError | OSError) else repr(error)
                self._announce(stuck=f"{self._name(version)}: {one_line(why, 1000)}")

    def _name(self, version: int) -> str:
        try:
            return replica_name(version, read_link(self._run.policies, version).state)
        except StoreError:
            return numbered(version)

    def _changed(self, folders: Sequence[Path]) -> None:
        self._announce(replicas=tuple(map(str, folders)), stuck="")
