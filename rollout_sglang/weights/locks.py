"""A lock between processes, held for as long as a block of a coroutine runs."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pipeline.errors import DeadlineExceededError

_POLL_S = 0.02


@asynccontextmanager
async def exclusive_lock(path: Path, deadline_s: float) -> AsyncIterator[int]:
    """Hold a lock on the file `path`, which is created when it is missing; yields its descriptor.

    The kernel releases it when the process dies. Raises DeadlineExceededError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        await _acquire(descriptor, path, deadline_s)
        yield descriptor
    finally:
        os.close(descriptor)


async def _acquire(descriptor: int, path: Path, deadline_s: float) -> None:
    ends = time.monotonic() + deadline_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > ends:
                raise DeadlineExceededError(
                    f"{path} was held by another process for {deadline_s:g} s; it is still giving weights to engines"
                ) from None
        await asyncio.sleep(_POLL_S)
