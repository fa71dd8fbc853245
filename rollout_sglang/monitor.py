"""Looks at all engines once a second: who came, went, was started again, is silent, or serves something else.

    silent for SILENCE_S, or its role
    says that it hangs                  quarantined, its requests in flight abandoned and asked elsewhere
    serves another version, or none     quarantined, unless weights are being given at this moment
    quarantined, and answers            resynced: verified, or given the published version, while the others go on
    the router was started again        it is told the admitted engines

An engine answers to a look by its HTTP process alone. A long prefill delays no look, so it is not taken for silence. A
scheduler that is frozen does not show there; the engine's role sees it (rollout_sglang.server.liveness) and says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from pipeline.errors import EvenKeelError, RetryableError, SupersededError
from rollout_sglang.engine_pool import EnginePool, PooledEngine, look
from rollout_sglang.transport import SILENCE_S
from rollout_sglang.weights.update_lease import Updates

PERIOD_S = 1.0
_LONGEST_PAUSE_S = 30.0
"""Between two attempts to resync an engine that fails each time; the first pauses are shorter."""
_log = logging.getLogger(__name__)


class Monitor:
    """See the module's head."""

    def __init__(
        self,
        pool: EnginePool,
        updates: Updates,
        resync: Callable[[Sequence[PooledEngine]], Awaitable[None]],
        published: Callable[[], int],
    ) -> None:
        """`resync` gives the published version to engines and verifies them."""
        self._pool = pool
        self._updates = updates
        self._resync = resync
        self._published = published
        self._resyncing: asyncio.Task[None] | None = None
        self._syncing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Look until cancelled."""
        try:
            while True:
                try:
                    await self.look()
                except (SupersededError, asyncio.CancelledError):
                    raise
                except (EvenKeelError, OSError) as error:
                    _log.warning("a look at the engines failed, the next one follows: %s", error)
                await asyncio.sleep(PERIOD_S)
        finally:
            beside = [task for task in (self._resyncing, self._syncing) if task is not None]
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    async def look(self) -> None:
        """Look once. Raises what the last resync raised."""
        if self._resyncing is not None and self._resyncing.done():
            resyncing, self._resyncing = self._resyncing, None
            resyncing.result()
        await self._pool.refresh()
        settled = await asyncio.to_thread(self._settled)
        engines = self._pool.engines
        began = time.monotonic()
        await asyncio.gather(*(look(engine) for engine in engines if not engine.member.silent))
        wrong = dict[PooledEngine, str]()
        if settled is not None and self._updates.newest() == settled[0]:
            seen = [engine for engine in engines if engine.answered >= began and engine.served != settled[1]]
            wrong = {engine: f"it serves version {engine.served}, expected {settled[1]}" for engine in seen}
        for engine in engines:
            await self._judge(engine, wrong.get(engine))
        answering = [e for e in self._pool.returnable if e.answered >= began and e.try_at <= time.monotonic()]
        if answering and self._resyncing is None:
            self._resyncing = asyncio.create_task(self._try_to_resync(answering))
        if self._syncing is None or self._syncing.done():  # beside it: a router that hangs delays no look
            self._syncing = asyncio.create_task(self._pool.sync_router())

    def _settled(self) -> tuple[int, int] | None:
        """Return the newest update and the version that engines should serve; None while one is under way."""
        settled = self._updates.settled()
        if settled is None:
            return None
        # Versions only rise: a lower one is what an update that saw a cached listing has remembered.
        return settled[0], max(self._published(), settled[1] or 0)

    async def _judge(self, engine: PooledEngine, wrong: str | None) -> None:
        if engine.trouble:
            admitted, reason = engine.quarantined is None, engine.trouble
            if engine.quarantined != reason:
                await self._pool.quarantine(engine, reason)
            if admitted:
                self._pool.abandon(engine, reason)
        if engine.quarantined is not None:
            return
        silent_s = time.monotonic() - engine.answered
        if silent_s > SILENCE_S:
            reason = f"it has answered nothing for {silent_s:.0f} s"
            await self._pool.quarantine(engine, reason)
            self._pool.abandon(engine, reason)
        elif wrong is not None:
            await self._pool.quarantine(engine, wrong)
            self._pool.abandon(engine, wrong)  # a publish that lost it left it paused: it would not answer

    async def _try_to_resync(self, engines: Sequence[PooledEngine]) -> None:
        try:
            await self._resync(engines)
        except (RetryableError, OSError) as error:
            _log.warning("%d engines could not be resynced, they are tried again: %s", len(engines), error)
        finally:
            for engine in engines:
                if engine.quarantined is not None:
                    engine.failures += 1
                    engine.try_at = time.monotonic() + min(_LONGEST_PAUSE_S, 2.0 ** min(engine.failures, 6) / 2)
