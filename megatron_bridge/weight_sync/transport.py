"""How buckets get from a learner rank to its engines: what ProcessGroupTransport and IpcTransport have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_bridge.weight_sync.buckets import Bucket
from megatron_bridge.weight_sync.event_loop_thread import EventLoopThread
from pipeline.ports.weight_update import WeightUpdateSession

BUCKET_DEADLINE_S = 60.0
"""An engine that takes longer for one bucket hangs. Meanwhile the ranks of the stage, and with them the other engines,
wait for the next gather."""


@dataclass(eq=False)
class WeightTransport(ABC):
    """Sends buckets to some engines; one that dies or hangs costs itself and at most its deadline, nobody else."""

    _session: WeightUpdateSession
    _event_loop: EventLoopThread
    _assigned: Sequence[int]
    """The engines."""
    _device: torch.device
    _deadline_s: float
    """What one engine may take for all buckets together; time in which it waits for others does not count."""
    _left_s: dict[int, float] = field(init=False, default_factory=dict)
    """Of that, by engine."""
    failures: dict[int, str] = field(init=False, default_factory=dict)
    """Engines that fell out since `open`, and why; they are sent nothing more."""
    sent_bytes: int = field(init=False, default=0)
    """Since `open`, over all engines."""

    @property
    @abstractmethod
    def engines(self) -> tuple[int, ...]:
        """Those that are left."""

    @abstractmethod
    def open(self, unreachable: Mapping[int, str]) -> None:
        """Begin a publish to every engine but the unreachable ones."""

    @abstractmethod
    def new_row(self, num_bytes: int) -> Tensor:
        """uint8 [at least num_bytes] to pack the next bucket into. It is the caller's until the bucket was sent."""

    @abstractmethod
    def send(self, bucket: Bucket) -> None:
        """Returns when each engine that is left has loaded the bucket or failed."""

    @abstractmethod
    def close(self) -> None:
        """Give back what was kept between publishes."""
