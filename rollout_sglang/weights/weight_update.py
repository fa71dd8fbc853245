"""The fleet as a receiver of tensors: implements pipeline.ports.weight_update.WeightUpdateSession.

    begin_weight_update   lock → every engine: pause, begin, `unverified`               (the process that publishes)
    receive               one bucket: the engine joins a broadcast, or opens memory of the sender, and loads it
                                                                            (every sender, for its own engines)
    end_weight_update     engines that took everything: end, flush, `unverified-13` → verify → admit; the others:
                          quarantine; then record the version and unlock

From `begin_weight_update` until it is verified, an engine claims no version. When a sender dies in between, the engines
get no requests until they are given weights again: by a resync from the last published folder, or by the next publish.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Unpack

from pipeline.errors import RetryableError
from pipeline.ports.weight_check import WeightCheck
from pipeline.ports.weight_update import ProcessGroupSpec, TensorSpec, WeightUpdateReport
from pipeline.stopwatch import Stopwatch
from rollout_sglang.client import CONTROL_DEADLINE_S, EngineClient
from rollout_sglang.fleet import Fleet, FleetSettings, Target, all_of, summarize, write_record
from rollout_sglang.weights.locks import exclusive_lock
from rollout_sglang.weights.receiver import Receiver

GIVE_UP_DEADLINE_S = 5.0
"""Longest wait for an engine that failed to end its session. It is quarantined whatever it answers."""


class FleetUpdateSession(Fleet):
    """A Fleet whose engines can be sent tensors. One publish at a time."""

    def __init__(self, urls: Sequence[str], *, ranks_per_engine: int, **settings: Unpack[FleetSettings]) -> None:
        super().__init__(urls, **settings)
        self.urls = tuple(urls)
        self.ranks_per_engine = ranks_per_engine
        control_deadline_s = min(CONTROL_DEADLINE_S, settings["request_deadline_s"])
        key = settings["api_key"]
        self._receivers = [Receiver(url, key, control_deadline_s=control_deadline_s) for url in urls]
        self._lock: AsyncExitStack | None = None
        self._record = -1

    @property
    def is_open(self) -> bool:
        """See WeightUpdateSession."""
        return self._lock is not None

    async def begin_weight_update(self) -> WeightUpdateReport:
        """Measured: lock_s, pause_s. Raises DeadlineExceededError when another process holds the lock for too long."""
        assert self._lock is None, "the last update was not ended"
        watch = Stopwatch()
        async with AsyncExitStack() as stack:
            self._record = await stack.enter_async_context(exclusive_lock(self._lock_path, self._load_deadline_s))
            watch.lap("lock_s")
            results = await all_of(_outcome(engine, self._ready) for engine in self._engines)
            watch.lap("pause_s")
            self._lock = stack.pop_all()
        return WeightUpdateReport(failures=_failures(results), measured=watch.seconds)

    async def join(self, engine: int, group_spec: ProcessGroupSpec, deadline_s: float) -> None:
        """See WeightUpdateSession."""
        await self._receivers[engine].join(group_spec, 1 + self.ranks_per_engine, deadline_s)

    async def is_member(self, engine: int, group: str) -> bool:
        """See WeightUpdateSession."""
        return await self._receivers[engine].is_member(group)

    async def leave(self, engine: int, group: str) -> None:
        """See WeightUpdateSession."""
        with suppress(RetryableError, TimeoutError):
            async with asyncio.timeout(GIVE_UP_DEADLINE_S):
                await self._receivers[engine].leave(group)

    async def receive(self, engine: int, group: str, tensors: Sequence[TensorSpec], deadline_s: float) -> None:
        """See WeightUpdateSession."""
        await self._receivers[engine].receive(group, tensors, deadline_s)

    async def receive_shared(self, engine: int, bucket: bytes, deadline_s: float) -> None:
        """See WeightUpdateSession."""
        await self._receivers[engine].receive_shared(bucket, self.ranks_per_engine, deadline_s)

    async def end_weight_update(
        self, version: int, directory: Path, check: WeightCheck | None, failures: Mapping[int, str]
    ) -> WeightUpdateReport:
        """See WeightUpdateSession. Measured: load_s, and what WeightVerifier.verify measures."""
        assert self._lock is not None, "begin_weight_update comes first"
        target = Target(version, directory, check)
        async with self._lock:
            self._lock = None
            measured: dict[int, dict[str, float]] = {}

            async def finish(engine: EngineClient) -> None:
                if engine.index in failures:
                    await self._give_up(engine)
                else:
                    measured[engine.index] = await self._verify_and_admit(engine, target)

            results = await all_of(_outcome(engine, finish) for engine in self._engines)
            failed_now = {index: reason for index, reason in _failures(results).items() if index not in failures}
            for index in failed_now:
                await self._give_up(self._engines[index])
            if measured:
                self._target = target
                write_record(self._record, version)
        numbers = summarize(version, list(measured.values())) if measured else {}
        return WeightUpdateReport(failures={**failures, **failed_now}, measured=numbers)

    async def close(self) -> None:
        """Release connections; engines and router go on."""
        await super().close()
        await asyncio.gather(*(receiver.close() for receiver in self._receivers))

    async def _ready(self, engine: EngineClient) -> None:
        await engine.pause()
        await self._receivers[engine.index].begin()

    async def _verify_and_admit(self, engine: EngineClient, target: Target) -> dict[str, float]:
        watch = Stopwatch()
        await self._receivers[engine.index].end(target.version, self._load_deadline_s)
        watch.lap("load_s")
        seconds = watch.seconds | await self._verify(engine, target.version, target.check)
        self._verified[engine.index] = target
        await self._admit(engine)
        return seconds

    async def _give_up(self, engine: EngineClient) -> None:
        """Quarantine the engine. If it still answers, its requests are aborted: other engines are then asked."""
        await self._quarantine(engine)
        with suppress(RetryableError, TimeoutError):
            async with asyncio.timeout(GIVE_UP_DEADLINE_S):
                await engine.invalidate()
                await self._receivers[engine.index].give_up()
                await engine.resume()


async def _outcome(engine: EngineClient, action: Callable[[EngineClient], Awaitable[None]]) -> str | None:
    """Why the action failed for this engine."""
    try:
        await action(engine)
    except RetryableError as error:
        return str(error)
    return None


def _failures(results: Sequence[str | None]) -> dict[int, str]:
    return {index: reason for index, reason in enumerate(results) if reason is not None}
