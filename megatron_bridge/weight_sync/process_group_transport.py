"""Buckets by broadcast, through process groups with the engines: kept between publishes, replaced when they break.

    caller        pack n+1 into the other buffer ─▶ wait for n ─▶ begin n+1
    event loop    the engine's call for bucket n ∥ until the broadcast of n has ended ─▶ Transfer

An engine takes part in no broadcast while it loads, so one at a time is under way in a group.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_bridge.weight_sync.buckets import Bucket
from megatron_bridge.weight_sync.process_groups import EngineGroup, connect
from megatron_bridge.weight_sync.transport import Transfer, WeightTransport
from pipeline.data.membership import Member
from pipeline.errors import RetryableError
from pipeline.ports.weights import ProcessGroupSpec

_POLL_S = 0.001


@dataclass(eq=False)
class ProcessGroupTransport(WeightTransport):
    """Each engine has a group of its own: one that dies or hangs breaks nothing but its own."""

    _groups: dict[int, EngineGroup] = field(init=False, default_factory=dict)
    _members: dict[int, Member] = field(init=False, default_factory=dict)
    """The engines that the groups are with."""
    _broken: list[EngineGroup] = field(init=False, default_factory=list)
    _kept: deque[Tensor] = field(init=False, default_factory=deque)
    """Buffers, the one that was given longest ago first."""

    @property
    def engines(self) -> tuple[int, ...]:
        """See WeightTransport."""
        return tuple(self._groups)

    def new_buffer(self, num_bytes: int) -> Tensor:
        """Two take turns: one is packed while the other is sent. On a GPU torch's allocator keeps memory, for training
        too; elsewhere fresh memory would cost as much as the copy into it."""
        if self._device.type == "cuda":
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        kept = self._kept.popleft() if len(self._kept) == 2 else None
        if kept is None or len(kept) < num_bytes:
            kept = torch.empty(num_bytes, dtype=torch.uint8)
        self._kept.append(kept)
        return kept

    def close(self) -> None:
        """Leave all groups."""
        for engine in self.engines:
            self._drop(engine)

    def _meet(self, engines: Sequence[Member]) -> None:
        """Have a group with every engine. A group with one that has left, moved or was started again is given up."""
        self._broken = [group for group in self._broken if not group.idle]
        members = {engine.index: engine for engine in engines}
        for engine in [engine for engine in self._groups if self._members[engine] != members.get(engine)]:
            self._drop(engine)
        self._members = members
        if members:
            with ThreadPoolExecutor(len(members), "engine-group") as threads:
                list(threads.map(self._have_group, members))

    def _begin(self, bucket: Bucket) -> dict[int, Future[Transfer]]:
        return {engine: self._send_to(engine, group, bucket) for engine, group in self._groups.items()}

    def _send_to(self, engine: int, group: EngineGroup, bucket: Bucket) -> Future[Transfer]:
        deadline_s, began = self._bucket_deadline_s(engine), time.monotonic()
        call = self._event_loop.start(self._session.receive(engine, group.name, bucket.tensors, deadline_s))
        group.broadcast(bucket.data, deadline_s)  # asked for in this thread: on a GPU after what its stream copies
        return self._event_loop.start(watch(group, call, began, deadline_s))

    def _have_group(self, engine: int) -> None:
        try:
            group = self._groups.get(engine)
            if group is not None and not self._event_loop.run(self._session.is_member(engine, group.name)):
                self._drop(engine)  # it was restarted
            if engine not in self._groups:
                self._groups[engine] = self._connect(engine)
        except RetryableError as error:
            self._fail(engine, str(error))

    def _connect(self, engine: int) -> EngineGroup:
        def invite(group_spec: ProcessGroupSpec, deadline_s: float) -> Future[None]:
            return self._event_loop.start(self._session.join(engine, group_spec, deadline_s))

        return connect(
            self._session.url(engine), self._session.ranks_per_engine, self._device, invite, self._left_s[engine]
        )

    def _fail(self, engine: int, why: str) -> None:
        self.failures[engine] = why
        self._kept.clear()  # a broadcast that is given up may still read what it was to send
        self._drop(engine)

    def _drop(self, engine: int) -> None:
        group = self._groups.pop(engine, None)
        if group is not None:
            group.abort()
            self._broken.append(group)
            self._event_loop.start(self._session.leave(engine, group.name))


async def watch(group: EngineGroup, call: Future[None], began: float, deadline_s: float) -> Transfer:
    """See a bucket to its end: the broadcast in `group`, and the call in which the engine takes part in it. A failure
    of one half ends both. `began` is a time.monotonic()."""
    failure, sent = None, began
    try:
        async with asyncio.timeout(deadline_s):
            while not group.done():
                if call.done():
                    call.result()
                await asyncio.sleep(_POLL_S)
            sent = time.monotonic()
            await asyncio.wrap_future(call)
    except RetryableError as error:
        failure = str(error)
    except TimeoutError:
        failure = "it did not load a bucket in time; the engine hangs or is overloaded"
    finally:
        call.cancel()
    return Transfer(seconds=time.monotonic() - began, wire_s=sent - began, failure=failure)
