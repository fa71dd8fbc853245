"""Buckets over real gloo groups into doubles of engines that die, hang and refuse."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_bridge.weight_sync import process_group_transport, process_groups
from megatron_bridge.weight_sync.process_group_transport import ProcessGroupTransport, watch
from megatron_bridge.weight_sync.process_groups import EngineGroup
from tests.doubles.receiving_double import ReceivingDouble
from tests.support import publishing
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
    assert transport._deadline_s == DEADLINE_S, "or the time above says nothing"
    assert transport.failures.keys() == {1}
    assert engines[0].received.keys() == {"large"}


def test_a_broadcast_that_never_ends_is_given_up() -> None:
    """What a backend without deadlines of its own does."""
    group = EngineGroup("group", SimpleNamespace(broadcast=lambda *_: SimpleNamespace(is_completed=lambda: False)))
    group.broadcast(torch.zeros(1, dtype=torch.uint8), 1.0)
    call: Future[None] = Future()
    call.set_result(None)
    transfer = asyncio.run(watch(group, call, time.monotonic(), 0.05))
    assert "did not load a bucket in time" in str(transfer.failure)
    assert transfer.seconds >= 0.05


class NeverForms:
    """A group that is there after its first broadcast only, as NCCL's, and waits in it for an engine that has died."""

    def __init__(self, backend: Any, thawed: Event) -> None:
        self._backend, self._thawed = backend, thawed
        self.began = Event()

    def broadcast(self, *arguments: Any) -> Any:
        self.began.set()
        assert self._thawed.wait(DEADLINE_S), "the sender waits for the group"
        return self._backend.broadcast(*arguments)

    def abort(self) -> None:
        self._backend.abort()


def test_a_group_that_never_forms_costs_at_most_the_deadline_of_its_engine(
    engines: list[ReceivingDouble], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other engine gets everything. Next time the broken one gets a fresh group, while the old one still waits."""
    thawed, stuck = Event(), list[NeverForms]()

    def connect(url: str, *arguments: Any) -> EngineGroup:
        group = process_groups.connect(url, *arguments)
        if url == engines[1].url and not stuck:
            stuck.append(NeverForms(group._backend, thawed))
            group._backend = stuck[0]
        return group

    monkeypatch.setattr(process_group_transport, "connect", connect)
    engines[1].bucket_fault = "hang"
    with publisher(engines, tmp_path, ProcessGroupTransport, deadline_s=publishing.DEADLINE_S) as publish:
        began = time.monotonic()
        transport = publish(weights(0))
        assert time.monotonic() - began < DEADLINE_S / 2
        assert stuck[0].began.is_set()
        assert transport.failures.keys() == {1}
        assert "hangs or is overloaded" in transport.failures[1]
        assert same(engines[0].received, weights(0))
        engines[1].restart()
        assert publish(weights(1)).failures == {}
        assert all(same(engine.received, weights(1)) for engine in engines)
        assert isinstance(transport, ProcessGroupTransport)
        assert [group._backend for group in transport._broken] == stuck, "kept for as long as it is at work"
        thawed.set()


def test_an_engine_that_never_answers_is_given_up_and_its_call_with_it() -> None:
    work = SimpleNamespace(is_completed=lambda: True, wait=lambda: None)
    group = EngineGroup("group", SimpleNamespace(broadcast=lambda *_: work))
    group.broadcast(torch.zeros(1, dtype=torch.uint8), 1.0)
    call: Future[None] = Future()
    transfer = asyncio.run(watch(group, call, time.monotonic(), 0.05))
    assert "did not load a bucket in time" in str(transfer.failure)
    assert transfer.wire_s < transfer.seconds, "the bytes had been sent"
    assert call.cancelled()


def buffers(publish: Publish) -> list[int]:
    """Where the buffers lie that the transport keeps."""
    transport = publish(weights(0))
    assert isinstance(transport, ProcessGroupTransport)
    return [buffer.data_ptr() for buffer in transport._kept]


def test_two_buffers_take_turns_from_publish_to_publish(publish: Publish) -> None:
    first = buffers(publish)
    assert len(set(first)) == 2
    assert set(buffers(publish)) == set(first)


def test_a_buffer_of_a_broadcast_that_was_given_up_is_never_written_again(
    engines: list[ReceivingDouble], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines[1].healthy_buckets, engines[1].bucket_fault = 1, "refuse"
    given: list[torch.Tensor] = []  # held, so that no address comes again
    lost: list[int] = []
    fail, new_buffer = ProcessGroupTransport._fail, ProcessGroupTransport.new_buffer

    def fail_and_note(transport: ProcessGroupTransport, engine: int, why: str) -> None:
        lost.extend(buffer.data_ptr() for buffer in given)
        fail(transport, engine, why)

    def give_and_note(transport: ProcessGroupTransport, num_bytes: int) -> torch.Tensor:
        given.append(new_buffer(transport, num_bytes))
        assert given[-1].data_ptr() not in lost
        return given[-1]

    monkeypatch.setattr(ProcessGroupTransport, "_fail", fail_and_note)
    monkeypatch.setattr(ProcessGroupTransport, "new_buffer", give_and_note)
    with publisher(engines, tmp_path, ProcessGroupTransport, deadline_s=DEADLINE_S) as publish:
        assert publish(weights(0)).failures.keys() == {1}
    assert lost
    assert same(engines[0].received, weights(0))


def test_the_next_bucket_is_packed_while_one_is_under_way(
    engines: list[ReceivingDouble], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether `send` has returned before the engines have loaded: they load when the next one is packed."""
    packed, loading = Event(), Event()

    def receive(engine: ReceivingDouble, request: Any) -> Any:
        loading.set()
        assert packed.wait(DEADLINE_S)
        return received(engine, request)

    def new_buffer(transport: ProcessGroupTransport, num_bytes: int) -> torch.Tensor:
        if loading.is_set():
            packed.set()
        elif transport._under_way:
            assert loading.wait(DEADLINE_S)
            packed.set()
        return given(transport, num_bytes)

    received, given = ReceivingDouble._receive, ProcessGroupTransport.new_buffer
    monkeypatch.setattr(ReceivingDouble, "_receive", receive)
    monkeypatch.setattr(ProcessGroupTransport, "new_buffer", new_buffer)
    with publisher(engines, tmp_path, ProcessGroupTransport, deadline_s=DEADLINE_S) as publish:
        assert publish(weights(0)).failures == {}
    assert packed.is_set()
    assert all(same(engine.received, weights(0)) for engine in engines)


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
