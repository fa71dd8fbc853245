"""What ProcessGroupTransport and IpcTransport have in common: they send buckets from a learner rank to its engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_bridge.weight_sync.buckets import Bucket
from megatron_bridge.weight_sync.event_loop_thread import EventLoopThread
from pipeline.data.membership import Member
from pipeline.ports.weight_update import WeightUpdateSession

BUCKET_DEADLINE_S = 60.0
"""An engine that takes longer for one bucket is taken to hang. The other engines of its sender wait for it."""


@dataclass(eq=False)
class WeightTransport(ABC):
    """Sends buckets to some engines. One that dies or hangs delays the others by at most its deadline."""

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

    @property
    @abstractmethod
    def engines(self) -> tuple[int, ...]:
        """Engines that have not failed since `open`."""

    @abstractmethod
    def open(self, engines: Sequence[Member], unreachable: Mapping[int, str]) -> None:
        """Begin a publish to those engines that this rank serves, but not to the unreachable ones."""

    @abstractmethod
    def new_buffer(self, num_bytes: int) -> Tensor:
        """uint8 [at least num_bytes] for the next bucket. The caller may write to it until the bucket was sent."""

    @abstractmethod
    def send(self, bucket: Bucket) -> None:
        """Returns when each engine that has not failed has loaded the bucket, or fails."""

    @abstractmethod
    def close(self) -> None:
        """Release what was kept between publishes."""
