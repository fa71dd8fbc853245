"""Buckets over real gloo groups into doubles of engines that die, hang and refuse."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_bridge.weight_sync.process_group_transport import ProcessGroupTransport, Transfer
from megatron_bridge.weight_sync.process_groups import EngineGroup
from pipeline.errors import DeadlineExceededError
from tests.doubles.receiving_double import BucketFault, ReceivingDouble
from tests.support.feeding import DEADLINE_S, Publish, publisher, same, weights


@pytest.fixture
def engines() -> Iterator[list[ReceivingDouble]]:
    with ExitStack() as stack:
        yield [stack.enter_context(ReceivingDouble()) for _ in range(2)]


@pytest.fixture
def publish(engines: list[ReceivingDouble], tmp_path: Path) -> Iterator[Publish]:
    with publisher(engines, tmp_path, ProcessGroupTransport) as publish:
        yield publish


def test_every_engine_gets_every_bit(engines: list[ReceivingDouble], publish: Publish) -> None:
    for seed in (0, 1):
        sent = weights(seed)
        wire = publish(sent)
        assert wire.failures == {}
        assert all(same(engine.received, sent) for engine in engines)
        assert wire.sent_bytes == 2 * sum(tensor.nbytes for tensor in sent.values())
    assert [len(engine.joined) for engine in engines] == [1, 1], "groups are kept between publishes"


@pytest.mark.parametrize("fault", ["refuse", "die", "hang"])
def test_an_engine_that_breaks_costs_at_most_its_deadline(
    engines: list[ReceivingDouble], publish: Publish, fault: BucketFault
) -> None:
    engines[1].healthy_buckets, engines[1].bucket_fault = 2, fault
    sent, began = weights(0), time.monotonic()
    wire = publish(sent)
    assert time.monotonic() - began < DEADLINE_S + 7
    assert wire.failures.keys() == {1}
    assert wire.engines == (0,)
    assert same(engines[0].received, sent)
    assert 0 < len(engines[1].received) < len(sent)
    if fault != "hang":
        engines[1].bucket_fault = None
        assert publish(weights(1)).failures == {}
        assert same(engines[1].received, weights(1))
        assert len(set(engines[1].joined)) == 2, "fresh name"
        assert len(engines[0].joined) == 1


def test_a_broadcast_that_the_engine_refused_is_not_waited_for(
    engines: list[ReceivingDouble], publish: Publish
) -> None:
    """More bytes than the sockets hold stay on the way until the broadcast's own deadline."""
    engines[1].bucket_fault = "refuse"
    began = time.monotonic()
    wire = publish({"large": torch.zeros(1 << 23)})
    assert time.monotonic() - began < DEADLINE_S
    assert wire.failures.keys() == {1}
    assert engines[0].received.keys() == {"large"}


def test_a_broadcast_that_never_ends_is_given_up() -> None:
    """What a backend without deadlines of its own does."""
    group = EngineGroup("group", SimpleNamespace(broadcast=lambda *_: SimpleNamespace(is_completed=lambda: False)))
    group.broadcast(torch.zeros(1, dtype=torch.uint8), 1.0)
    call: Future[None] = Future()
    call.set_result(None)
    assert not Transfer(group, call, time.monotonic() + 60).done()
    with pytest.raises(DeadlineExceededError, match="did not load a bucket in time"):
        Transfer(group, call, time.monotonic() - 1).done()


def test_a_restarted_engine_gets_a_fresh_group(engines: list[ReceivingDouble], publish: Publish) -> None:
    publish(weights(0))
    engines[0].restart()
    assert publish(weights(1)).failures == {}
    assert same(engines[0].received, weights(1))
    assert [len(engine.joined) for engine in engines] == [2, 1]


def test_an_engine_that_refuses_the_group_is_not_waited_for(engines: list[ReceivingDouble], publish: Publish) -> None:
    engines[0].refuses_groups = True
    began = time.monotonic()
    wire = publish(weights(0))
    assert time.monotonic() - began < DEADLINE_S
    assert "Failed to initialize" in wire.failures[0]
    assert same(engines[1].received, weights(0))


def test_an_unreachable_engine_is_left_out(engines: list[ReceivingDouble], publish: Publish) -> None:
    publish(weights(0))
    engines[0].stop()
    wire = publish(weights(1))
    assert wire.failures == {}
    assert wire.engines == (1,)
    assert same(engines[1].received, weights(1))


def test_torch_knows_none_of_the_groups(publish: Publish) -> None:
    known = set(torch.distributed.distributed_c10d._world.pg_map)
    publish(weights(0))
    assert set(torch.distributed.distributed_c10d._world.pg_map) == known
