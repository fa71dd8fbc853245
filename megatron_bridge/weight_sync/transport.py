"""What ProcessGroupTransport and IpcTransport have in common: they send buckets from a learner rank to its engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_bridge.weight_sync.buckets import Bucket
from megatron_bridge.weight_sync.event_loop_thread import EventLoopThread
from pipeline.data.membership import Member
from pipeline.ports.weights import WeightUpdateSession

BUCKET_DEADLINE_S = 60.0
"""An engine that takes longer for one bucket is taken to hang. The other engines of its sender wait for it."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """How one engine took one bucket."""

    seconds: float
    """From asking the engine until it had loaded the bucket, or failed."""
    wire_s: float = 0.0
    """Of these, until all bytes had been sent. 0 where nothing is sent."""
    failure: str | None = None


@dataclass(eq=False)
class WeightTransport(ABC):
    """Sends buckets to some engines. One that dies or hangs delays the others by at most its deadline.

    One bucket is under way at a time, and the caller packs the next one meanwhile.
    """

    _session: WeightUpdateSession
    _event_loop: EventLoopThread
    _device: torch.device
    _deadline_s: float
    """What one engine may take for all buckets together; time in which it waits for others does not count."""
    _left_s: dict[int, float] = field(init=False, default_factory=dict)
    """What is left of that deadline, by engine."""
    failures: dict[int, str] = field(init=False, default_factory=dict)
    """Engines that failed since `open`, and why; they are sent nothing more."""
    sent_bytes: int = field(init=False, default=0)
    """Bytes that were loaded since `open`, over all engines."""
    transfer_s: float = field(init=False, default=0.0)
    """Seconds since `open` in which a bucket was under way."""
    wire_s: float = field(init=False, default=0.0)
    """Of these, until each bucket had been sent, to the slowest engine; asking the engine is in it."""
    _bucket: Bucket | None = field(init=False, default=None)
    """The one under way; its memory is not given back before that has ended."""
    _under_way: dict[int, Future[Transfer]] = field(init=False, default_factory=dict)

    @property
    @abstractmethod
    def engines(self) -> tuple[int, ...]:
        """Engines that have not failed since `open`."""

    def open(self, engines: Sequence[Member], unreachable: Mapping[int, str]) -> None:
        """Begin a publish to those engines that this rank serves, but not to the unreachable ones."""
        assert not self._under_way, "finish comes first"
        reachable = [engine for engine in engines if engine.index not in unreachable]
        self._left_s = {engine.index: self._deadline_s for engine in reachable}
        self.failures, self.sent_bytes = {}, 0
        self.transfer_s, self.wire_s = 0.0, 0.0
        self._meet(reachable)

    @abstractmethod
    def new_buffer(self, num_bytes: int) -> Tensor:
        """uint8 [at least num_bytes] for the next bucket. The caller may write to it until the bucket is sent."""

    def send(self, bucket: Bucket) -> None:
        """Begin to have all engines that are left load a bucket of `new_buffer`, once the one before has ended."""
        self.finish()
        self._bucket = bucket
        self._under_way = self._begin(bucket)

    def finish(self) -> None:
        """Returns when each engine that has not failed has loaded the last bucket, or fails."""
        under_way, bucket, self._under_way, self._bucket = self._under_way, self._bucket, {}, None
        if not under_way:
            return
        assert bucket is not None
        wait(under_way.values())  # each has its deadline
        transfers = {engine: transfer.result() for engine, transfer in under_way.items()}
        for engine, transfer in transfers.items():
            if transfer.failure is None:
                self._left_s[engine] -= transfer.seconds
                self.sent_bytes += bucket.data.nbytes
            else:
                self._fail(engine, transfer.failure)
        self.transfer_s += max(transfer.seconds for transfer in transfers.values())
        self.wire_s += max(transfer.wire_s for transfer in transfers.values())

    @abstractmethod
    def close(self) -> None:
        """Release what was kept between publishes."""

    @abstractmethod
    def _meet(self, engines: Sequence[Member]) -> None:
        """Be ready to send to these engines; those that fail are in `failures` afterwards."""

    @abstractmethod
    def _begin(self, bucket: Bucket) -> dict[int, Future[Transfer]]:
        """Engine → how it takes the bucket, for all that are left. Each ends within `_bucket_deadline_s`."""

    @abstractmethod
    def _fail(self, engine: int, why: str) -> None:
        """Send no more to an engine."""

    def _bucket_deadline_s(self, engine: int) -> float:
        return min(BUCKET_DEADLINE_S, self._left_s[engine])
