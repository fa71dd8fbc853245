"""Writes a policy folder in a thread, while a publish streams its tensors to the engines.

    every stage's first rank   tensor ─▶ queue ─▶ shards of its stage ─▶ stage-00.json
    rank 0                     … ─▶ wait for every stage ─▶ config, index, manifest ─▶ rename

Writers of several ranks find one another's files in the folder. They use no collectives: their threads run while the
main threads may be in collectives of their own.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_bridge.hf.shard_writer import whole_tensors, write_shards
from pipeline.data.files import FIRST_POLL_S, slower, write_atomically
from pipeline.errors import DeadlineExceededError

_END = None


class _DiscardedError(Exception):
    """Ends a writer whose version was not published."""


class FolderWriter:
    """One stage's share of one version. Exactly one of `commit` and `discard` ends it.

    What is added and not written yet stays in this machine's memory: at most the whole share.
    """

    def __init__(self, temporary: Path, stage: int) -> None:
        """`temporary` is the folder that all stages write into; whoever comes first makes it."""
        self._temporary = temporary
        self._stage = stage
        self._prefix = f"model-stage{stage:02}"
        self._waiting: queue.SimpleQueue[tuple[str, Tensor] | None] = queue.SimpleQueue()
        self._complete: Callable[[], None] | None = None
        self._kept = False
        self._failure: Exception | None = None
        self._published = 0.0
        self._seconds = 0.0
        self._thread = threading.Thread(target=self._write, name=f"policy-folder-{stage}", daemon=True)
        self._thread.start()

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy the tensor; it is written in the background."""
        self._waiting.put((name, tensor.detach().to("cpu", copy=True).contiguous()))

    def commit(self, complete: Callable[[], None] | None = None) -> None:
        """The version is published: the share counts. `complete` runs in the thread after the last shard (rank 0)."""
        self._kept, self._complete, self._published = True, complete, time.monotonic()
        self._waiting.put(_END)

    def discard(self) -> None:
        """The version was not published: what is written so far is removed."""
        self._waiting.put(_END)

    def wait(self, deadline_s: float) -> float:
        """Seconds from `commit` to the end of the writing, once it is over.

        Raises DeadlineExceededError, and what stopped the writing of a share that counts. A share that was discarded
        may have failed: another stage that was discarded too removes their folder.
        """
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise DeadlineExceededError(
                f"{self._temporary} was not written within {deadline_s:g} s; see whether its disk is slow or full"
            )
        if self._kept and self._failure is not None:
            raise self._failure
        return self._seconds

    def _write(self) -> None:
        try:
            self._temporary.mkdir(parents=True, exist_ok=True)
            manifest = write_shards(whole_tensors(self._drain()), self._temporary, prefix=self._prefix)
            write_atomically(stage_file(self._temporary, self._stage), json.dumps(manifest))
            if self._complete is not None:
                self._complete()
            self._seconds = time.monotonic() - self._published
        except _DiscardedError:
            for path in self._temporary.glob(f"{self._prefix}-*"):
                path.unlink()
            with suppress(OSError):  # the last stage to leave removes the folder
                self._temporary.rmdir()
        except Exception as error:  # noqa: BLE001 (raised by wait, in the main thread)
            self._failure = error

    def _drain(self) -> Iterator[tuple[str, Tensor]]:
        while (item := self._waiting.get()) is not _END:
            yield item
        if not self._kept:
            raise _DiscardedError


def stage_file(temporary: Path, stage: int) -> Path:
    """Where a stage leaves its manifest once its shards are written."""
    return temporary / f"stage-{stage:02}.json"


def gather_manifests(temporary: Path, num_stages: int, deadline_s: float) -> dict[str, Any]:
    """The manifest of all stages, removed from the folder. Raises DeadlineExceededError when one never ends."""
    ends = time.monotonic() + deadline_s
    manifest: dict[str, Any] = {}
    for stage in range(num_stages):
        path = stage_file(temporary, stage)
        pause_s = FIRST_POLL_S
        while path.name not in os.listdir(temporary):  # the stage may be on another host: see pipeline.data.store
            if time.monotonic() > ends:
                raise DeadlineExceededError(f"{path} did not appear within {deadline_s:g} s; see that stage's log")
            time.sleep(pause_s)
            pause_s = slower(pause_s)
        manifest |= json.loads(path.read_text())
        path.unlink()
    return manifest
