"""Receive tensors as a fleet: one process begins and ends the update of all engines.

    begin_weight_update   number → engines that answer: pause, begin, `unverified`      (the process that publishes)
    attend                the other senders hear number and engines, and send as part of that update
    receive               one bucket: the engine joins a broadcast, or opens memory of the sender, and loads it
                                                                            (every sender, for its own engines)
    end_weight_update     engines that took everything: end, flush, `unverified-13` → verify → admit; the others:
                          quarantine; then record the version and end the update

An engine that can stage weights (rollout_sglang.client) is not paused at the beginning of an update beside
training. It serves the version that it has until it was sent everything; then it is paused for as long as the staged
weights take the place of the others, and their checksums are compared. A sender that dies before that changes nothing.

From `begin_weight_update` until it is verified, any other engine claims no version. When a sender dies in between, it
gets no requests until it is given weights again: by a resync from the last published folder, or by the next publish. An
engine that joins meanwhile is none of this update's: the collector gives it the version afterwards.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, Unpack

from pydantic import ValidationError

from pipeline import spans
from pipeline.data.membership import Member, Membership
from pipeline.errors import EngineUnavailableError, EngineVersionError, EvenKeelError, FatalError, RetryableError
from pipeline.ports.weights import ComingCheck, ProcessGroupSpec, TensorSpec, WeightCheck, WeightUpdateReport
from pipeline.spans import Stopwatch
from rollout_sglang.client import CONTROL_DEADLINE_S, Stage
from rollout_sglang.engine_pool import PooledEngine, all_of, summarize
from rollout_sglang.fleet import Fleet, FleetSettings, Target
from rollout_sglang.protocol import INVALIDATED, UNVERIFIED, DialectOf, Updated
from rollout_sglang.transport import Lost, Transport
from rollout_sglang.weights.update_lease import Update

GIVE_UP_DEADLINE_S = 5.0
"""Longest wait for an engine that failed to end its session. It is quarantined whatever it answers."""


class FleetUpdateSession(Fleet):
    """A Fleet whose engines can be sent tensors, for one publish at a time. Every sender attends the update that one
    process begins, and asks its own engines to receive. A process awaits all methods on one event loop."""

    def __init__(self, membership: Membership, *, ranks_per_engine: int, **settings: Unpack[FleetSettings]) -> None:
        super().__init__(membership, **settings)
        self.ranks_per_engine = ranks_per_engine
        self._control_deadline_s = min(CONTROL_DEADLINE_S, settings["request_deadline_s"])
        self._api_key = settings["api_key"]
        self._receivers: dict[int, Receiver] = {}
        """Of the engines of the update, by index."""
        self._open: AsyncExitStack | None = None
        self._update: Update | None = None
        self._engines: list[PooledEngine] = []
        self._staging: set[int] = set()
        """Of the engines of the update, those that take it while they serve."""

    @property
    def is_open(self) -> bool:
        """Whether this process has begun an update and not ended it."""
        return self._open is not None

    def url(self, engine: int) -> str:
        """Return where an engine of the update listens."""
        return self._receivers[engine].url

    async def begin_weight_update(self, *, serving: bool = False) -> WeightUpdateReport:
        """Take the next number, pause every engine and make it ready for new weights. From now on an engine claims no
        version, until it is verified that it holds what it was sent. With `serving`, engines that can are not paused
        before the end of the update, and keep their version until then; the report names them.

        Measured: lock_s, pause_s. Raises DeadlineExceededError when another process goes on for too long."""
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
            ready = partial(self._ready, serving=serving)
            results = await all_of(self._outcome(engine, ready) for engine in answering)
            watch.lap("pause_s")
            self._open = stack.pop_all()
        return WeightUpdateReport(
            failures=absent | _failures(answering, results),
            measured=watch.seconds,
            number=self._update.number,
            engines=[engine.member for engine in self._engines],
            staging=sorted(self._staging),
        )

    def attend(self, number: int, engines: Sequence[Member], staging: Sequence[int] = ()) -> None:
        """Send as part of the update that another process has begun, in which some engines are `staging`."""
        known, self._receivers = self._receivers, {}
        for member in engines:
            receiver = known.get(member.index)
            if receiver is None or receiver.url != member.url:
                deadline_s, lost = self._control_deadline_s, partial(self._pool.lost, member)
                receiver = Receiver(
                    member.url,
                    self._api_key,
                    control_deadline_s=deadline_s,
                    lost=lost,
                    keeps_kv=self._keeps_kv,
                )
            receiver.take_part(number, staging=member.index in staging)
            self._receivers[member.index] = receiver

    async def join(self, engine: int, group_spec: ProcessGroupSpec, deadline_s: float) -> None:
        """Have the engine's ranks join the process group. Raises RetryableError."""
        receiver = self._receivers[engine]
        await receiver.while_alive(receiver.join(group_spec, 1 + self.ranks_per_engine, deadline_s))

    async def is_member(self, engine: int, group: str) -> bool:
        """Return whether the engine still has the group: one that was restarted has not. Raises RetryableError."""
        receiver = self._receivers[engine]
        return await receiver.while_alive(receiver.is_member(group))

    async def leave(self, engine: int, group: str) -> None:
        """Have the engine forget a group that its sender gave up, if it still answers."""
        with suppress(RetryableError, TimeoutError):
            async with asyncio.timeout(GIVE_UP_DEADLINE_S):
                if engine in self._receivers:
                    await self._receivers[engine].leave(group)

    async def receive(self, engine: int, group: str, tensors: Sequence[TensorSpec], deadline_s: float) -> None:
        """Have the engine take part in one broadcast of these tensors, flattened to bytes one after the other, and load
        them. Raises RetryableError."""
        receiver = self._receivers[engine]
        await receiver.while_alive(receiver.receive(group, tensors, deadline_s))

    async def receive_shared(self, engine: int, bucket: bytes, deadline_s: float) -> None:
        """Have the engine open memory of this process and load the tensors in it; when it answers, it has let go of
        that memory. `bucket` is a pickle that SGLang's own unpickler accepts
        (megatron_bridge.weight_sync.ipc_transport). Raises RetryableError."""
        receiver = self._receivers[engine]
        await receiver.while_alive(receiver.receive_shared(bucket, self.ranks_per_engine, deadline_s))

    async def end_weight_update(
        self, version: int, directory: Path, check: WeightCheck | ComingCheck | None, failures: Mapping[int, str]
    ) -> WeightUpdateReport:
        """Verify that the engines that took everything hold `version`, and admit them; quarantine those named in
        `failures` and those that fail now. The report names all that failed. Engines work while parts of the check have
        yet to come. `directory` is where the weights lie, now or soon, for engines that come back later.

        Measured: load_s, and what WeightVerifier.verify measures."""
        assert self._open is not None, "begin_weight_update comes first"
        assert self._update is not None
        coming = check if isinstance(check, ComingCheck) else ComingCheck.known(version, check)
        async with self._open:
            self._open = None
            measured: dict[int, dict[str, float]] = {}

            async def finish(engine: PooledEngine) -> None:
                if engine.member in self._silent:
                    await self._pool.quarantine(engine, failures[engine.index])  # it was given nothing
                elif engine.index in failures:
                    await self._give_up(engine, failures[engine.index])
                else:
                    measured[engine.index] = await self._verify_and_admit(engine, version, directory, coming)

            results = await all_of(self._outcome(engine, finish) for engine in self._engines)
            failed = _failures(self._engines, results)
            failed_now = {index: reason for index, reason in failed.items() if index not in failures}
            lost = [engine for engine in self._engines if engine.index in failed_now]
            await all_of(self._give_up(engine, failed_now[engine.index]) for engine in lost)
            if measured:  # an engine was compared with all of the check
                self._target = Target(version, directory, None if check is None else coming.whole())
                self._update.given = version
        numbers = summarize(version, list(measured.values())) if measured else {}
        return WeightUpdateReport(
            failures={**failures, **failed_now},
            measured=numbers,
            number=self._update.number,
            engines=[engine.member for engine in self._engines],
        )

    async def close(self) -> None:
        """Release connections; engines and router go on."""
        await super().close()
        await asyncio.gather(*(receiver.close() for receiver in self._receivers.values()))

    async def _ready(self, engine: PooledEngine, *, serving: bool) -> None:
        serves = serving and engine.quarantined is None
        if serves and await self._while_alive(engine, self._receivers[engine.index].stage()):
            self._staging.add(engine.index)
            return
        with spans.span(f"engine {engine.index}/weights", "pause"):
            await self._while_alive(engine, engine.client.pause())
            await self._while_alive(engine, self._receivers[engine.index].begin())

    async def _verify_and_admit(
        self, engine: PooledEngine, version: int, directory: Path, check: ComingCheck
    ) -> dict[str, float]:
        watch = Stopwatch(lane=f"engine {engine.index}/weights", version=version)
        receiver, deadline_s = self._receivers[engine.index], self._load_deadline_s
        if engine.index in self._staging:
            await self._while_alive(engine, receiver.finish_stage(directory, deadline_s))
            watch.lap("stage_s")
            await self._while_alive(engine, engine.client.pause())
            watch.lap("pause_s")
            ending = engine.client.update_from_disk(version, directory, deadline_s=deadline_s)
        else:
            ending = receiver.end(version, deadline_s)
        await self._while_alive(engine, ending)
        watch.lap("load_s")
        seconds = watch.seconds | await self._while_alive(engine, self._verify(engine, version, check))
        await self._pool.admit(engine, version)
        return seconds

    async def _outcome(self, engine: PooledEngine, action: Callable[[PooledEngine], Awaitable[None]]) -> str | None:
        """Why the action failed for this engine."""
        try:
            await action(engine)
        except RetryableError as error:
            return str(error)
        except FatalError as error:
            return await self._pool.refused(engine, error)
        return None

    async def _give_up(self, engine: PooledEngine, reason: str) -> None:
        """Quarantine the engine. If it still answers, its requests are aborted: other engines are then asked."""
        await self._pool.quarantine(engine, reason)
        if await asyncio.to_thread(self._pool.lost, engine.member) is not None:
            return
        with suppress(EvenKeelError, TimeoutError):
            async with asyncio.timeout(GIVE_UP_DEADLINE_S):
                await engine.client.invalidate()
                await self._receivers[engine.index].give_up()
                await engine.client.resume()


def _failures(engines: Sequence[PooledEngine], results: Sequence[str | None]) -> dict[int, str]:
    pairs = zip(engines, results, strict=True)
    return {engine.index: reason for engine, reason in pairs if reason is not None}


T = TypeVar("T")


class Receiver:
    """The weight update calls of a server at `url`.

    Methods raise EngineUnavailableError when the server refuses, drops or never answers, and EngineVersionError when it
    answers that it could not do it. No call is repeated: it would wait for a second broadcast.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        *,
        control_deadline_s: float,
        update: int | None = None,
        lost: Lost = lambda: None,
        keeps_kv: bool = False,
    ) -> None:
        """`keeps_kv`: see EngineClient."""
        self.url, self.lost = url, lost
        self._keeps_kv = keeps_kv
        self._deadline_s = control_deadline_s
        self._transport = Transport(url, api_key)
        self._transport.update = update
        self._dialect = DialectOf(self._transport, control_deadline_s)
        self._stage = Stage(self._transport, control_deadline_s)
        self._staging = False

    def take_part(self, update: int, *, staging: bool = False) -> None:
        """From now on, calls belong to another weight update (rollout_sglang.weights.update_lease); `staging` says
        whether another sender has had the engine `stage`."""
        self._transport.update, self._staging = update, staging

    async def while_alive(self, call: Coroutine[Any, Any, T]) -> T:
        """See Transport.while_alive; `lost` is this receiver's."""
        return await self._transport.while_alive(call, self.lost)

    async def stage(self) -> bool:
        """Have the engine take its next weights while it serves, with the version that it has. False where it cannot;
        then it is paused, and `begin` comes next."""
        try:
            self._staging = (await self._dialect()).stages and await self._stage.begin()
        except EngineVersionError:
            self._staging = False
        return self._staging

    async def finish_stage(self, folder: Path, deadline_s: float) -> None:
        """All tensors came: returns when they are loaded and hashed, as the weights of a folder that there will be."""
        await self._stage.finish(folder, deadline_s)

    async def begin(self) -> None:
        """Make a paused engine's weights loadable and take its version away. Requests under way keep waiting."""
        dialect = await self._dialect()
        if dialect.no_tensors:
            raise EngineVersionError(f"{self.url}: {dialect.no_tensors}")
        if dialect.sessions:
            await self._open_session()
        await self._name(INVALIDATED)

    async def _open_session(self) -> None:
        if not (await self._ask("/begin_weight_update", {})).success:
            # A sender that died left its session open.
            await self._do("/end_weight_update", {})
            await self._do("/begin_weight_update", {})

    async def join(self, group_spec: ProcessGroupSpec, world_size: int, deadline_s: float) -> None:
        """The engine's ranks join the group as ranks 1, 2, …"""
        request = {
            "master_address": group_spec.address,
            "master_port": group_spec.port,
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": group_spec.group,
            "backend": group_spec.backend,
        }
        await self._do("/init_weights_update_group", request, deadline_s)

    async def is_member(self, group: str) -> bool:
        """Whether the server still has the group. It is asked by an update of no tensors, for which nothing is sent.

        A server without sessions would end at that call if it had no such group. It is told to leave the group instead,
        and joins it again.
        """
        if self._staging:
            return await self._stage.is_member(group)
        if not (await self._dialect()).sessions:
            await self._ask("/destroy_weights_update_group", {"group_name": group})
            return False
        return (await self._ask("/update_weights_from_distributed", _update(group, ()))).success

    async def leave(self, group: str) -> None:
        """Forget the group."""
        await self._do("/destroy_weights_update_group", {"group_name": group})

    async def receive(self, group: str, tensors: Sequence[TensorSpec], deadline_s: float) -> None:
        """Take part in one broadcast of the flattened tensors, load them, and drop what other weights have cached,
        unless it is kept."""
        if self._staging:
            await self._stage.receive(group, tensors, deadline_s)
            return
        # The cache is flushed with every bucket, because no sender knows which is the engine's last. That costs less
        # than one call of /flush_cache, which also gives memory back to the system.
        request = _update(group, tensors) | {"load_format": "flattened_bucket", "flush_cache": not self._keeps_kv}
        await self._do("/update_weights_from_distributed", request, deadline_s)

    async def receive_shared(self, bucket: bytes, ranks: int, deadline_s: float) -> None:
        """Open a bucket in the memory of another process of the machine (one copy of the pickle for each rank), load
        its tensors, and drop what was cached with other weights, unless it is kept."""
        text = base64.b64encode(bucket).decode()
        if self._staging:
            await self._stage.receive_shared(text, deadline_s)
            return
        request = {
            "serialized_named_tensors": [text] * ranks,
            "load_format": "flattened_bucket",
            "flush_cache": not self._keeps_kv,
        }
        await self._do("/update_weights_from_tensor", request, deadline_s)

    async def end(self, version: int, deadline_s: float) -> None:
        """All tensors came: finish the weights (quantize, repack), claim `version` unverified."""
        if (await self._dialect()).sessions:
            await self._do("/end_weight_update", {}, deadline_s)
        await self._name(f"{UNVERIFIED}{version}")

    async def give_up(self) -> None:
        """Not all tensors came: close the session only."""
        if not self._staging and (await self._dialect()).sessions:
            await self._ask("/end_weight_update", {})

    async def close(self) -> None:
        """Release the connections."""
        await self._transport.close()

    async def _name(self, version: str) -> None:
        await self._do("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def _do(self, path: str, request: dict[str, Any], deadline_s: float | None = None) -> None:
        answer = await self._ask(path, request, deadline_s)
        if not answer.success:
            raise EngineVersionError(f"{self.url}{path} failed: {' '.join(answer.message.split())[:300]}; see its log")

    async def _ask(self, path: str, request: dict[str, Any], deadline_s: float | None = None) -> Updated:
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        answer = await self._transport.call(
            "POST", path, deadline_s=deadline_s, json=request, accept=(400,), repeatable=False
        )
        try:
            return Updated.model_validate_json(answer.content)
        except ValidationError:
            raise EngineUnavailableError(
                f"{self.url}{path} answered something else than SGLang's protocol; check the version of the server"
            ) from None


def _update(group: str, tensors: Sequence[TensorSpec]) -> dict[str, Any]:
    return {
        "names": [tensor.name for tensor in tensors],
        "dtypes": [tensor.dtype for tensor in tensors],
        "shapes": [list(tensor.shape) for tensor in tensors],
        "group_name": group,
        "flush_cache": False,
    }
