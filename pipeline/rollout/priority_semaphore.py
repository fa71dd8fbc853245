"""Many requests at once: a semaphore that serves the oldest batch first, and a gather that leaves nothing running."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, TypeVar

Result = TypeVar("Result")

Priority = tuple[int, int]
"""(batch, group): what is smaller goes first."""


class PrioritySemaphore:
    """A semaphore whose waiters are served by priority, not by time of arrival. A group of an old batch that is asked
    late, or again, goes before the groups of later batches that already wait."""

    def __init__(self, number: int) -> None:
        self._free = number
        self._arrivals = count()
        self._waiting: list[tuple[Priority, int, asyncio.Future[None]]] = []

    @property
    def num_waiting(self) -> int:
        """How many wait for a slot."""
        return sum(not granted.done() for _, _, granted in list(self._waiting))

    @asynccontextmanager
    async def acquire(self, priority: Priority) -> AsyncIterator[None]:
        """Hold one of the slots for the time of the `async with`."""
        await self._take(priority)
        try:
            yield
        finally:
            self._give()

    async def _take(self, priority: Priority) -> None:
        if self._free > 0:
            self._free -= 1
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._arrivals), granted))
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():
                self._give()  # cancelled in the moment in which it was granted
            raise

    def _give(self) -> None:
        """Give the slot to the first in order that still waits."""
        while self._waiting:
            _, _, granted = heapq.heappop(self._waiting)
            if not granted.done():
                granted.set_result(None)
                return
        self._free += 1


async def gather_or_cancel(work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Results in order. When one of them fails, or the caller is cancelled, the others are cancelled and waited for.

    A failure is raised as it is, not in a group: callers and the supervisor tell errors apart by their type.
    When the caller is cancelled, it gets CancelledError, whatever failed meanwhile.

    The loop has its turn after the beginning of each: a request begins with a millisecond of work, and a hundred that
    began at once would stop the loop for a tenth of a second.
    """
    if not work:
        return []
    # Not a TaskGroup: it lets a failure hide the cancellation of its caller.
    tasks: list[asyncio.Task[Result]] = []
    try:
        for item in work:
            tasks.append(asyncio.create_task(item))
            await asyncio.sleep(0)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        return [task.result() for task in tasks if task.done()]  # where not all are done, one of them raises
    finally:
        for item in work[len(tasks) :]:
            item.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
