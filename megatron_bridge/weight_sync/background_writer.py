"""Writes a policy folder in a thread, from the snapshot that was published.

    every stage's first rank   snapshot ─▶ shards of its stage ─▶ stage-00.json
    rank 0                     … ─▶ wait for every stage ─▶ config, index, manifest ─▶ rename

Writers of several ranks find one another's files in the folder. They use no collectives: their threads run while the
main threads may be in collectives of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_bridge.hf.shard_writer import whole_tensors, write_shards
from pipeline.data.files import FIRST_POLL_S, slower, write_atomically
from pipeline.errors import DeadlineExceededError


class FolderWriter:
    """One stage's share of one version, which is published already."""

    def __init__(
        self,
        temporary: Path,
        stage: int,
        tensors: Iterable[tuple[str, Tensor]],
        complete: Callable[[], None] | None = None,
    ) -> None:
        """Begin to write `tensors`, which must not change meanwhile. `temporary` is the folder that all stages write
        into; whoever comes first makes it, and whoever fails removes it. `complete` runs in the thread after the last
        shard (rank 0)."""
        self._temporary = temporary
        self._stage = stage
        self._tensors = tensors
        self._complete = complete
        self._failure: Exception | None = None
        self._seconds = 0.0
        self._thread = threading.Thread(target=self._write, name=f"policy-folder-{stage}", daemon=True)
        self._thread.start()

    def wait(self, deadline_s: float) -> float:
        """Seconds that the writing took, once it is over. Raises DeadlineExceededError, and what stopped it."""
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise DeadlineExceededError(
                f"{self._temporary} was not written within {deadline_s:g} s; see whether its disk is slow or full"
            )
        if self._failure is not None:
            raise self._failure
        return self._seconds

    def _write(self) -> None:
        began = time.monotonic()
        try:
            self._temporary.mkdir(parents=True, exist_ok=True)
            prefix = f"model-stage{self._stage:02}"
            manifest = write_shards(whole_tensors(self._tensors), self._temporary, prefix=prefix)
            write_atomically(stage_file(self._temporary, self._stage), json.dumps(manifest))
            if self._complete is not None:
                self._complete()
            self._seconds = time.monotonic() - began
        except Exception as error:  # noqa: BLE001 (raised by wait, in the main thread)
            shutil.rmtree(self._temporary, ignore_errors=True)  # what gets no name must not fill the disk
            self._failure = error


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
        manifest |= json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
    return manifest
