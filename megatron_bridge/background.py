"""An event loop in a thread: HTTP goes on while the calling thread waits for a process group."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """Runs coroutines on one event loop for as long as the process lives. The thread is a daemon: it owns nothing that
    must outlive a crash."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin; the future has the result. Cancelling the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result. The coroutine bounds its own time."""
        return self.start(work).result()
