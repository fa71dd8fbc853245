"""Buckets by broadcast, through process groups with the engines: kept between publishes, replaced when they break."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_bridge.weight_sync.buckets import Bucket
from megatron_bridge.weight_sync.process_groups import EngineGroup, connect
from megatron_bridge.weight_sync.transport import BUCKET_DEADLINE_S, WeightTransport
from pipeline.data.membership import Member
from pipeline.errors import DeadlineExceededError, RetryableError
from pipeline.ports.weight_update import ProcessGroupSpec

_POLL_S = 0.001


@dataclass
class Transfer:
    """One bucket on its way to one engine: the broadcast, and the call in which the engine takes part in it."""

    group: EngineGroup
    call: Future[None]
    ends: float
    sent: bool = False

    def done(self) -> bool:
        """Whether the engine has loaded the bucket. Raises RetryableError; a failure of one half ends both."""
        self.sent = self.sent or self.group.done()
        if self.call.done():
            self.call.result()
            if self.sent:
                return True
        if time.monotonic() > self.ends:
            raise DeadlineExceededError("it did not load a bucket in time; the engine hangs or is overloaded")
        return False


@dataclass(eq=False)
class ProcessGroupTransport(WeightTransport):
    """Each engine has a group of its own: one that dies or hangs breaks nothing but its own."""

    _groups: dict[int, EngineGroup] = field(init=False, default_factory=dict)
    _members: dict[int, Member] = field(init=False, default_factory=dict)
    """The engines that the groups are with."""
    _broken: list[EngineGroup] = field(init=False, default_factory=list)

    @property
    def engines(self) -> tuple[int, ...]:
        """See WeightTransport."""
        return tuple(self._groups)

    def open(self, engines: Sequence[Member], unreachable: Mapping[int, str]) -> None:
        """Begin a publish: have a group with every engine but the unreachable ones. A group with an engine that has
        left, moved or was started again is given up."""
        self._broken = [group for group in self._broken if not group.idle]
        members = {engine.index: engine for engine in engines if engine.index not in unreachable}
        self._left_s = dict.fromkeys(members, self._deadline_s)
        self.failures, self.sent_bytes = {}, 0
        for engine in [engine for engine in self._groups if self._members[engine] != members.get(engine)]:
            self._drop(engine)
        self._members = members
        wanted = list(members)
        if wanted:
            with ThreadPoolExecutor(len(wanted), "engine-group") as threads:
                list(threads.map(self._have_group, wanted))

    def new_buffer(self, num_bytes: int) -> Tensor:
        """New memory each time: a broadcast that was given up may still read what it was to send."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def send(self, bucket: Bucket) -> None:
        """Broadcast to all engines that are left, at once; returns when each has loaded the bucket or failed."""
        began = time.monotonic()
        under_way = {engine: self._begin(engine, bucket, began) for engine in self._groups}
        while under_way:
            for engine, transfer in list(under_way.items()):
                try:
                    if not transfer.done():
                        continue
                    self._left_s[engine] -= time.monotonic() - began
                    self.sent_bytes += bucket.data.nbytes
                except RetryableError as error:
                    transfer.call.cancel()
                    self._fail(engine, error)
                del under_way[engine]
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Leave all groups."""
        for engine in self.engines:
            self._drop(engine)

    def _begin(self, engine: int, bucket: Bucket, began: float) -> Transfer:
        group, deadline_s = self._groups[engine], min(BUCKET_DEADLINE_S, self._left_s[engine])
        call = self._event_loop.start(self._session.receive(engine, group.name, bucket.tensors, deadline_s))
        group.broadcast(bucket.data, deadline_s)
        return Transfer(group, call, began + deadline_s)

    def _have_group(self, engine: int) -> None:
        try:
            group = self._groups.get(engine)
            if group is not None and not self._event_loop.run(self._session.is_member(engine, group.name)):
                self._drop(engine)  # it was restarted
            if engine not in self._groups:
                self._groups[engine] = self._connect(engine)
        except RetryableError as error:
            self._fail(engine, error)

    def _connect(self, engine: int) -> EngineGroup:
        def invite(group_spec: ProcessGroupSpec, deadline_s: float) -> Future[None]:
            return self._event_loop.start(self._session.join(engine, group_spec, deadline_s))

        return connect(
            self._session.url(engine), self._session.ranks_per_engine, self._device, invite, self._left_s[engine]
        )

    def _fail(self, engine: int, error: RetryableError) -> None:
        self.failures[engine] = str(error)
        self._drop(engine)

    def _drop(self, engine: int) -> None:
        group = self._groups.pop(engine, None)
        if group is not None:
            group.abort()
            self._broken.append(group)
            self._event_loop.start(self._session.leave(engine, group.name))
