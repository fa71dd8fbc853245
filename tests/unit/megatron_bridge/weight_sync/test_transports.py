"""What every WeightTransport promises, with real groups or shared memory and doubles of engines that die or hang."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_bridge.weight_sync.ipc_transport import IpcTransport
from megatron_bridge.weight_sync.transport import ProcessGroupTransport
from tests.doubles.receiving_double import BucketFault, ReceivingDouble
from tests.support.publishing import DEADLINE_S, Publish, publisher, same, weights


@pytest.fixture(params=[ProcessGroupTransport, IpcTransport])
def publish(engines: list[ReceivingDouble], tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Publish]:
    with publisher(engines, tmp_path, request.param) as publish:
        yield publish


def test_every_engine_gets_every_bit(engines: list[ReceivingDouble], publish: Publish) -> None:
    kinds = {
        "scale": torch.tensor([[1.5, 2.0**-20]]),
        "quantized": torch.arange(-300, 300).to(torch.float8_e4m3fn).reshape(20, 30),
        "norm": torch.randn(33).bfloat16(),
        "one": torch.tensor(7.0),
    }
    for seed in (0, 1):
        sent = weights(seed) | kinds
        transport = publish(sent)
        assert transport.failures == {}
        assert all(same(engine.received, sent) for engine in engines)
        assert transport.sent_bytes == 2 * sum(tensor.nbytes for tensor in sent.values())


@pytest.mark.parametrize("fault", ["refuse", "die", "hang"])
def test_an_engine_that_breaks_costs_at_most_its_deadline(
    engines: list[ReceivingDouble], publish: Publish, fault: BucketFault
) -> None:
    """The other engine gets everything, and the broken one, once it is well again, takes part in the next publish."""
    engines[1].healthy_buckets, engines[1].bucket_fault = 2, fault
    sent, began = weights(0), time.monotonic()
    transport = publish(sent)
    assert time.monotonic() - began < DEADLINE_S + 27, "not torch's deadline, nor that of a call"
    assert transport.failures.keys() == {1}
    assert transport.engines == (0,)
    assert same(engines[0].received, sent)
    assert 0 < len(engines[1].received) < len(sent)
    assert transport.sent_bytes < 2 * sum(tensor.nbytes for tensor in sent.values())
    if fault != "hang":
        engines[1].bucket_fault = None
        assert publish(weights(1)).failures == {}
        assert all(same(engine.received, weights(1)) for engine in engines)


def test_an_engine_is_not_charged_for_waiting_on_another(engines: list[ReceivingDouble], publish: Publish) -> None:
    """Engine 0 takes 1.3 s for each of six buckets, which is more than DEADLINE_S: it fails in the third.

    Engine 1 takes 0.1 s, and has 2.4 s to spare on a busy machine. It would exceed DEADLINE_S too if its waits for
    engine 0 counted.
    """
    engines[0].bucket_s, engines[1].bucket_s = 1.3, 0.1
    transport = publish(weights(0))
    assert transport.failures.keys() == {0}
    assert same(engines[1].received, weights(0))


def test_the_wire_is_measured_apart_from_loading(engines: list[ReceivingDouble], publish: Publish) -> None:
    """An engine loads for 0.1 s after each of six buckets has come. A busy machine may notice late that one has."""
    for engine in engines:
        engine.bucket_s = 0.1
    transport = publish(weights(0))
    assert transport.transfer_s - transport.wire_s >= 0.3
    assert (transport.wire_s > 0) == isinstance(transport, ProcessGroupTransport)


def test_a_restarted_engine_takes_part_in_the_next_publish(engines: list[ReceivingDouble], publish: Publish) -> None:
    publish(weights(0))
    engines[0].restart()
    assert publish(weights(1)).failures == {}
    assert all(same(engine.received, weights(1)) for engine in engines)


def test_an_unreachable_engine_is_left_out(engines: list[ReceivingDouble], publish: Publish) -> None:
    """It failed before the transport began, so the transport reports no failure of its own."""
    publish(weights(0))
    engines[0].stop()
    transport = publish(weights(1))
    assert transport.failures == {}
    assert transport.engines == (1,)
    assert same(engines[1].received, weights(1))
