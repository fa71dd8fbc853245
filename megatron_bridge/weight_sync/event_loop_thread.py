"""An event loop in a thread: HTTP requests go on while the calling thread waits for a process group."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from pipeline.errors import DeadlineExceededError

CLOSE_DEADLINE_S = 10.0

T = TypeVar("T")


class EventLoopThread:
    """Runs coroutines on one event loop until `close`. The thread is a daemon: it need not finish its work when the
    process ends."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin to run a coroutine; the future gets its result. Cancelling the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. There is no deadline here: the coroutine must have one."""
        return self.start(work).result()

    def close(self) -> None:
        """Cancel what runs and close the loop; nothing can be started any more. A second call changes nothing.

        Raises DeadlineExceededError when a coroutine does not end.
        """
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(CLOSE_DEADLINE_S)
        if self._thread.is_alive():
            raise DeadlineExceededError(
                f"the {self._thread.name} thread did not end in {CLOSE_DEADLINE_S:g} s; one of its calls blocks"
            )

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # which cancels, awaits and closes at its end
            runner.run(self._until_ended())

    async def _until_ended(self) -> None:
        await self._ended.wait()
