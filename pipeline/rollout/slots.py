"""Bound the prompts under way: slots, given by priority, as many as the engines' keys and values have room for.

fleet's looks ──loads──▶ growth of each engine ──▶ slots = prompts an engine × admitted engines ≤ ceiling
                                                   ▲ more with each answered prompt; fewer at once, after a
                                                   │ look at a full engine or an answer that was retracted
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count

from pipeline.ports.load import EngineLoad

TARGET = 0.8
"""Share of an engine's keys and values up to which it is given more prompts, and to which it is brought back."""
BACK_OFF = 0.95
"""Share at which it has too many prompts: live requests grow, and soon some would lose their keys and values."""
Priority = tuple[int, int]
"""(batch, group): the smaller goes first."""


def growth(load: EngineLoad) -> float:
    """Return by what share an engine's prompts may grow while those under way are answered once; negative: by what
    share there must be fewer at once.

    The rule is that of prime-rl's adaptive concurrency (github.com/PrimeIntellect-ai/prime-rl, docs/inference.md):
    while the engine has room, each answered prompt lets one more in; a full engine goes to what it holds at the target.
    A queue is SGLang's own judgment that what runs will need the room.
    """
    if load.kv_use >= BACK_OFF:
        return TARGET / load.kv_use - 1.0
    return 1.0 if load.kv_use < TARGET and load.waiting <= load.running / 2 else 0.0


class Slots:
    """A semaphore whose waiters are served by priority, not by arrival, and whose number follows the engines. A group
    of an old batch that is asked late, or again, goes before waiting groups of later batches."""

    def __init__(self, ceiling: int, *, engines: int = 1) -> None:
        """There are never more than `ceiling` slots, and as many as that where no engine tells its load. An engine that
        does gets at most its share of `ceiling`, one in `engines`, and begins with it: an engine that comes back finds
        prompts that no other engine has begun."""
        self.kv_use: float | None = None
        """Mean share of the engines' keys and values that is in use; None where no engine tells."""
        self.held = 0
        self._ceiling, self._share = ceiling, max(1.0, ceiling / engines)
        self._engines: int | None = None
        """The admitted engines; None: nobody watches them."""
        self._each: float | None = None
        """Prompts of one engine; None until an engine tells its load."""
        self._growth = 0.0
        self._falls = 0
        self._retractions = 0
        self._arrivals = count()
        self._waiting: list[tuple[Priority, int, asyncio.Future[None]]] = []

    @property
    def number(self) -> int:
        """The number of slots now."""
        if self._engines is None or (self._each is None and self._engines):
            return self._ceiling
        return min(self._ceiling, max(1, math.floor((self._each or 0.0) * self._engines + 1e-9)))

    @property
    def num_waiting(self) -> int:
        """Number of waiters for a slot; may be read from another thread."""
        return sum(not granted.done() for _, _, granted in list(self._waiting))

    @property
    def is_overdrawn(self) -> bool:
        return self.held > self.number

    @asynccontextmanager
    async def acquire(self, priority: Priority) -> AsyncIterator[int]:
        """Hold a slot during the `async with`. Yields what `answered` needs."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._arrivals), granted))
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():
                self._give()  # cancelled at the moment of the grant
            raise
        try:
            yield self._falls
        finally:
            self._give()

    def answered(self, asked: int, retractions: int) -> None:
        """Take note of a prompt's answers. `asked`: what `acquire` yielded; `retractions`: how often its samples lost
        their keys and values to others. A retraction counts like a full engine, but only once for the prompts that
        were under way together: those asked before the last fall say nothing about the number since."""
        self._retractions += retractions
        if self._each is None or not self._engines:
            return
        if retractions and asked == self._falls:
            self._fall((TARGET / BACK_OFF - 1.0) / self._engines)
        elif self._waiting and not retractions:
            self._each = min(self._share, self._each + self._growth / self._engines)
            self._grant()

    def observe(self, loads: Sequence[EngineLoad | None]) -> None:
        """Take note of the load of each admitted engine (pipeline.ports.load.InFlight)."""
        self._engines = len(loads)
        told = [load for load in loads if load is not None]
        self._growth = 0.0
        if told:
            self._each = self._each or self._share
            self.kv_use = sum(load.kv_use for load in told) / len(told)
            changes = [growth(load) for load in told]
            if (fall := sum(change for change in changes if change < 0.0)) < 0.0:
                self._fall(fall / len(loads))
            else:
                self._growth = sum(changes) / len(loads)
        self._grant()

    def figures(self) -> dict[str, float]:
        """Return the slots now, the mean KV use at the last look, and the retractions since the last call."""
        retractions, self._retractions = self._retractions, 0
        found: dict[str, float] = dict(in_flight=self.number, retractions=retractions)
        return found if self.kv_use is None else found | dict(kv_use=self.kv_use)

    def _fall(self, change: float) -> None:
        """Go below the prompts that are under way by a share, `change` < 0. To do so twice for the same prompts changes
        nothing: those under way must end first."""
        assert self._each is not None, "the callers know it"
        assert self._engines, "as well"
        lower = max(1.0, self.held * (1.0 + change) / self._engines)
        if lower < self._each:
            self._each = lower
            self._falls += 1

    def _give(self) -> None:
        self.held -= 1
        self._grant()

    def _grant(self) -> None:
        """Give free slots to the first waiters by priority."""
        while self._waiting and self.held < self.number:
            _, _, granted = heapq.heappop(self._waiting)
            if not granted.done():
                granted.set_result(None)
                self.held += 1
