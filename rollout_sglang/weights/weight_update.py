"""Send tensors to a fleet: one process begins and ends the update of all engines, several may send.

    begin_weight_update   number → engines that answer: pause, begin, `unverified`      (the process that publishes)
    attend                the other senders get number and engines, and send as part of that update
    receive               one bucket: the engine joins a broadcast, or opens memory of the sender, and loads it
                                                                            (every sender, for its own engines)
    end_weight_update     engines that took everything: end, flush, `unverified-13` → verify → admit; the others:
                          quarantine; then record the version and end the update

An engine that can stage weights (rollout_sglang.client) is not paused at the beginning of an update during training. It
serves its version until it has all tensors; then it is paused while the staged weights replace the others and their
checksums are compared. A sender that dies earlier changes nothing.

From `begin_weight_update` until its verification, any other engine claims no version. When a sender dies in between,
the engine gets no requests until it is given weights again: by a resync from the last published folder, or by the next
publish. An engine that joins meanwhile is not part of the update: the collector gives it the version afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, Unpack

from pipeline import spans
from pipeline.data.membership import Member, Membership
from pipeline.errors import EngineVersionError, EvenKeelError, FatalError, RecipeError, RetryableError
from pipeline.nccl import mismatch
from pipeline.ports.weights import ComingCheck, ProcessGroupSpec, TensorSpec, WeightCheck, WeightUpdateReport
from pipeline.spans import Stopwatch
from rollout_sglang.client import EngineClient
from rollout_sglang.engine_pool import PooledEngine, all_of, summarize
from rollout_sglang.fleet import Fleet, FleetSettings, Target
from rollout_sglang.weights.update_lease import Update

T = TypeVar("T")
GIVE_UP_DEADLINE_S = 5.0
"""Longest wait for a failed engine to end its session. It is quarantined in any case."""


class FleetUpdateSession(Fleet):
    """A Fleet that sends tensors to its engines, for one publish at a time. Every sender attends the update that one
    process begins, and asks its own engines to receive. Await all methods of a process on one event loop."""

    def __init__(
        self, membership: Membership, *, ranks_per_engine: int, nccl: str = "", **settings: Unpack[FleetSettings]
    ) -> None:
        """`nccl` is the release of NCCL in whose groups the senders broadcast; empty for other transports."""
        super().__init__(membership, **settings)
        self.ranks_per_engine = ranks_per_engine
        self._nccl = nccl
        self._receivers: dict[int, EngineClient] = {}
        self._members: Mapping[int, Member] = {}
        self._open: AsyncExitStack | None = None
        self._update: Update | None = None
        self._engines: list[PooledEngine] = []
        self._staging: set[int] = set()
        """The engines of the update that take it while they serve."""

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def url(self, engine: int) -> str:
        return self._receivers[engine].url

    async def begin_weight_update(self, *, serving: bool = False) -> WeightUpdateReport:
        """Take the next number, pause every engine and make it ready for new weights. From now on an engine claims no
        version until it is verified. With `serving`, engines that can stage weights keep serving their version until
        the end of the update; the report names them. Measured: lock_s, pause_s. Raises DeadlineExceededError if no turn
        comes, RecipeError if all engines that answer have another NCCL."""
        assert self._open is None, "the last update was not ended"
        watch = Stopwatch()
        async with AsyncExitStack() as stack:
            self._update = await stack.enter_async_context(self._updates.take("publish", self._load_deadline_s))
            watch.lap("lock_s")
            answering, absent = await self._answering()
            self._engines = self._pool.engines
            self.attend(self._update.number, [engine.member for engine in self._engines])
            for engine in self._engines:
                engine.client.take_part(self._update.number)
            self._staging = set()
            foreign = await self._failures(answering, self._require_nccl)
            if foreign and len(foreign) == len(answering) and all(engine.nccl for engine in answering):
                raise RecipeError(next(iter(foreign.values())))

            async def ready(engine: PooledEngine) -> None:
                receiver, serves = self._receivers[engine.index], serving and engine.quarantined is None
                if serves and await self._while_alive(engine, receiver.stage()):
                    self._staging.add(engine.index)
                    return
                with spans.span(f"engine {engine.index}/weights", "pause"):
                    await self._while_alive(engine, engine.client.pause())
                    if self._colocated:  # keys and values follow at the end, when the learner needs less
                        parts = receiver.wake("weights", "cuda_graph", deadline_s=self._load_deadline_s)
                        await self._while_alive(engine, parts)
                    await self._while_alive(engine, receiver.begin_update())

            failed = foreign | await self._failures([one for one in answering if one.index not in foreign], ready)
            watch.lap("pause_s")
            self._open = stack.pop_all()
        return WeightUpdateReport(
            failures=absent | failed,
            measured=watch.seconds,
            number=self._update.number,
            engines=[engine.member for engine in self._engines],
            staging=sorted(self._staging),
        )

    async def _require_nccl(self, engine: PooledEngine) -> None:
        """Raise EngineVersionError for an engine with which the learner can form no group over NCCL."""
        if self._nccl and engine.nccl is None:
            engine.nccl = await self._while_alive(engine, engine.client.nccl())
        if why := mismatch(self._nccl, engine.nccl or ""):
            raise EngineVersionError(f"engine {engine.index} at {engine.url} cannot be sent weights: {why}")

    def attend(self, number: int, engines: Sequence[Member], staging: Sequence[int] = ()) -> None:
        """Send as part of an update that another process has begun, in which the engines of `staging` stage."""
        known, self._receivers = self._receivers, {}
        self._members = {member.index: member for member in engines}
        for index, member in self._members.items():
            receiver = known.get(index)
            if receiver is None or receiver.url != member.url:
                receiver = self._pool.client(member.url, index)
            receiver.take_part(number, staging=index in staging)
            self._receivers[index] = receiver

    async def _while_listed(self, engine: int, call: Coroutine[Any, Any, T]) -> T:
        """Return the result of a call to an engine of the update; give it up when the engine's role gives up."""
        return await self._receivers[engine].while_alive(call, partial(self._pool.lost, self._members[engine]))

    async def join(self, engine: int, group_spec: ProcessGroupSpec, deadline_s: float) -> None:
        """Have the engine's ranks join the process group. Raises RetryableError."""
        joining = self._receivers[engine].join(group_spec, 1 + self.ranks_per_engine, deadline_s)
        await self._while_listed(engine, joining)

    async def is_member(self, engine: int, group: str) -> bool:
        """Return whether the engine still has the group: a restarted engine has not. Raises RetryableError."""
        return await self._while_listed(engine, self._receivers[engine].is_member(group))

    async def leave(self, engine: int, group: str) -> None:
        """Have the engine forget a group that its sender gave up, if it still answers."""
        with suppress(RetryableError, TimeoutError):
            async with asyncio.timeout(GIVE_UP_DEADLINE_S):
                if engine in self._receivers:
                    await self._receivers[engine].leave(group)

    async def receive(self, engine: int, group: str, tensors: Sequence[TensorSpec], deadline_s: float) -> None:
        """Have the engine take part in one broadcast of the flattened tensors, and load them. Raises RetryableError."""
        await self._while_listed(engine, self._receivers[engine].receive(group, tensors, deadline_s))

    async def receive_shared(self, engine: int, bucket: bytes, deadline_s: float) -> None:
        """Have the engine open memory of this process and load the tensors in it; when it answers, it no longer uses
        the memory. `bucket` is a pickle for SGLang's unpickler (megatron_bridge.weight_sync.ipc_transport). Raises
        RetryableError."""
        receiving = self._receivers[engine].receive_shared(bucket, self.ranks_per_engine, deadline_s)
        await self._while_listed(engine, receiving)

    async def end_weight_update(
        self, version: int, directory: Path, check: WeightCheck | ComingCheck | None, failures: Mapping[int, str]
    ) -> WeightUpdateReport:
        """Verify that the engines without `failures` hold `version`, and admit them; quarantine the engines in
        `failures` and those that fail now. The report names all failures. `check` may be incomplete at the beginning.
        `directory` is the folder of the weights, now or soon, for engines that come back later. Measured: load_s, and
        the measurements of WeightVerifier.verify."""
        assert self._open is not None, "begin_weight_update comes first"
        assert self._update is not None
        coming = check if isinstance(check, ComingCheck) else ComingCheck.known(version, check)
        async with self._open:
            self._open = None
            measured: dict[int, dict[str, float]] = {}

            async def finish(engine: PooledEngine) -> None:
                if engine.member in self._silent:
                    await self._pool.quarantine(engine, failures[engine.index])  # it was given nothing
                    return
                if engine.index in failures:
                    await self._give_up(engine, failures[engine.index])
                    return
                watch = Stopwatch(lane=f"engine {engine.index}/weights", version=version)
                receiver, deadline_s = self._receivers[engine.index], self._load_deadline_s
                if engine.index in self._staging:
                    await self._while_alive(engine, receiver.finish_stage(directory, deadline_s))
                    watch.lap("stage_s")
                    await self._while_alive(engine, engine.client.pause())
                    watch.lap("pause_s")
                    ending = engine.client.update_from_disk(version, directory, deadline_s=deadline_s)
                else:
                    ending = receiver.end_update(version, deadline_s)
                await self._while_alive(engine, ending)
                if self._colocated:
                    await self._while_alive(engine, receiver.wake("kv_cache", deadline_s=deadline_s))
                watch.lap("load_s")
                seconds = watch.seconds | await self._while_alive(engine, self._verify(engine, version, coming))
                await self._pool.admit(engine, version)
                measured[engine.index] = seconds

            failed = await self._failures(self._engines, finish)
            failed_now = {index: reason for index, reason in failed.items() if index not in failures}
            lost = [engine for engine in self._engines if engine.index in failed_now]
            await all_of(self._give_up(engine, failed_now[engine.index]) for engine in lost)
            if measured:  # an engine was compared with all of the check
                self._aim_at(Target(version, directory, None if check is None else coming.whole()))
                self._update.given = version
        numbers = summarize(version, list(measured.values())) if measured else {}
        return WeightUpdateReport(
            failures={**failures, **failed_now},
            measured=numbers,
            number=self._update.number,
            engines=[engine.member for engine in self._engines],
        )

    async def close(self) -> None:
        await super().close()
        await asyncio.gather(*(receiver.close() for receiver in self._receivers.values()))

    async def _failures(
        self, engines: Sequence[PooledEngine], action: Callable[[PooledEngine], Awaitable[None]]
    ) -> dict[int, str]:
        """Act on all engines at once. Return engine index → reason for each failure."""
        failures = {}

        async def act(engine: PooledEngine) -> None:
            try:
                await action(engine)
            except RetryableError as error:
                failures[engine.index] = str(error)
            except FatalError as error:
                failures[engine.index] = await self._pool.refused(engine, error)

        await all_of(act(engine) for engine in engines)
        return {engine.index: failures[engine.index] for engine in engines if engine.index in failures}

    async def _give_up(self, engine: PooledEngine, reason: str) -> None:
        """Quarantine the engine. If it still answers, abort its requests: they go to other engines."""
        await self._pool.quarantine(engine, reason)
        if await asyncio.to_thread(self._pool.lost, engine.member) is not None:
            return
        with suppress(EvenKeelError, TimeoutError):
            async with asyncio.timeout(GIVE_UP_DEADLINE_S):
                await engine.client.invalidate()
                await self._receivers[engine.index].give_up_update()
                if self._colocated:
                    await engine.client.wake(deadline_s=GIVE_UP_DEADLINE_S)
                await engine.client.resume()
