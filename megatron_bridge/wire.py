"""How buckets get from a learner rank to its engines: what StreamedChannel asks of BroadcastWire and SharedWire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_bridge.background import Background
from megatron_bridge.buckets import Bucket
from pipeline.ports import EngineFeed

BUCKET_DEADLINE_S = 60.0
"""An engine that takes longer for one bucket hangs. Meanwhile the ranks of the stage, and with them the other engines,
wait for the next gather."""


class Wire(Protocol):
    """Sends buckets to some engines; one that dies or hangs costs itself and at most its deadline, nobody else."""

    failures: dict[int, str]
    """Engines that fell out since `open`, and why; they are sent nothing more."""
    sent_bytes: int
    """Since `open`, over all engines."""

    @property
    def engines(self) -> Sequence[int]:
        """Those that are left."""
        ...

    def open(self, unreachable: Mapping[int, str]) -> None:
        """Begin a publish to every engine but the unreachable ones."""
        ...

    def new_row(self, num_bytes: int) -> Tensor:
        """uint8 [at least num_bytes] to pack the next bucket into. It is the caller's until the bucket was sent."""
        ...

    def send(self, bucket: Bucket) -> None:
        """Returns when each engine that is left has loaded the bucket or failed."""
        ...

    def close(self) -> None:
        """Give back what was kept between publishes."""
        ...


class WireFactory(Protocol):
    """Makes the wire of one learner rank."""

    def __call__(
        self,
        feed: EngineFeed,
        background: Background,
        engines: Sequence[int],
        device: torch.device,
        deadline_s: float,
    ) -> Wire:
        """`deadline_s` is what one of the `engines` may take for all buckets together; time in which it waits for
        others does not count."""
        ...
