"""Publishes weights to doubles of engines, over a transport of choice."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from megatron_bridge.weight_sync.transport import EventLoopThread, WeightTransport, pack
from rollout_sglang.weights.weight_update import FleetUpdateSession
from tests.doubles.receiving_double import ReceivingDouble
from tests.support.fleets import members, settings

BUCKET_BYTES = 1 << 12
DEADLINE_S = 3.0
Publish = Callable[[dict[str, Tensor]], WeightTransport]


@contextmanager
def publisher(
    engines: Sequence[ReceivingDouble],
    folder: Path,
    new_transport: type[WeightTransport],
    *,
    ranks: int = 1,
    deadline_s: float = DEADLINE_S,
) -> Iterator[Publish]:
    """Sends tensors to all engines, over the same transport each time; a publish may take `deadline_s` seconds."""
    event_loop = EventLoopThread("test")
    membership = members(folder, [engine.url for engine in engines])
    fleet = FleetUpdateSession(
        membership, **settings(folder, deadline_s=20, load_deadline_s=20), ranks_per_engine=ranks
    )
    transport = new_transport(fleet, event_loop, torch.device("cpu"), deadline_s)

    def send(tensors: dict[str, Tensor]) -> WeightTransport:
        report = event_loop.run(fleet.begin_weight_update())
        transport.open(report.engines, report.failures)
        for bucket in pack(tensors.items(), BUCKET_BYTES, transport.new_buffer):
            transport.send(bucket)
        transport.finish()
        event_loop.run(fleet.end_weight_update(1, folder, None, {**report.failures, **transport.failures}))
        return transport

    try:
        yield send
    finally:
        transport.close()
        event_loop.run(fleet.close())
        event_loop.close()
        gc.collect()  # a connection that is still open says so in the test that left it, not in a later one


def weights(seed: int) -> dict[str, Tensor]:
    """20 kB, more than four buckets."""
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{i}.weight": torch.randn(20 + i, 30, generator=generator) for i in range(8)}


def same(received: dict[str, Tensor], sent: dict[str, Tensor]) -> bool:
    """Bit by bit, whatever the dtype."""
    return received.keys() == sent.keys() and all(
        received[name].dtype == sent[name].dtype
        and received[name].shape == sent[name].shape
        and torch.equal(received[name].flatten().view(torch.uint8), sent[name].flatten().view(torch.uint8))
        for name in sent
    )
