"""Buckets over real gloo groups into doubles of engines that die, hang and refuse."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_bridge.weight_sync.process_group_transport import ProcessGroupTransport, Transfer
from megatron_bridge.weight_sync.process_groups import EngineGroup
from pipeline.errors import DeadlineExceededError
from tests.doubles.receiving_double import ReceivingDouble
from tests.support.publishing import Publish, publisher, same, weights

DEADLINE_S = 40.0
"""No engine of this file runs into it."""


@pytest.fixture
def publish(engines: list[ReceivingDouble], tmp_path: Path) -> Iterator[Publish]:
    with publisher(engines, tmp_path, ProcessGroupTransport, deadline_s=DEADLINE_S) as publish:
        yield publish


def test_a_broadcast_that_the_engine_refused_is_not_waited_for(
    engines: list[ReceivingDouble], publish: Publish
) -> None:
    """More bytes than the sockets hold stay on the way until the broadcast's own deadline."""
    engines[1].bucket_fault = "refuse"
    began = time.monotonic()
    transport = publish({"large": torch.zeros(1 << 23)})
    assert time.monotonic() - began < DEADLINE_S / 2
    assert transport.failures.keys() == {1}
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


def test_a_group_that_broke_is_replaced_under_a_fresh_name(engines: list[ReceivingDouble], publish: Publish) -> None:
    engines[1].bucket_fault = "refuse"
    publish(weights(0))
    engines[1].bucket_fault = None
    assert publish(weights(1)).failures == {}
    assert [len(set(engine.joined)) for engine in engines] == [1, 2]


def test_an_engine_that_refuses_the_group_is_not_waited_for(engines: list[ReceivingDouble], publish: Publish) -> None:
    engines[0].refuses_groups = True
    began = time.monotonic()
    transport = publish(weights(0))
    assert time.monotonic() - began < DEADLINE_S / 2
    assert "Failed to initialize" in transport.failures[0]
    assert same(engines[1].received, weights(0))


def test_torch_knows_none_of_the_groups(publish: Publish) -> None:
    known = set(torch.distributed.distributed_c10d._world.pg_map)
    publish(weights(0))
    assert set(torch.distributed.distributed_c10d._world.pg_map) == known
