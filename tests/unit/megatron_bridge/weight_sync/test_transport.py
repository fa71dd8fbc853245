"""Buckets over real gloo groups into doubles of engines that die, hang and refuse."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_bridge.weight_sync import transport
from megatron_bridge.weight_sync import transport as transport_module
from megatron_bridge.weight_sync.transport import (
    _ERROR_HANDLING,
    Bucket,
    EngineGroup,
    EventLoopThread,
    ProcessGroupTransport,
    pack,
    watch,
)
from pipeline.errors import DeadlineExceededError
from rollout_sglang.transport import Transport
from tests.doubles.receiving_double import ReceivingDouble
from tests.doubles.sglang_double import EngineDouble
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

    real_connect = transport_module.connect

    def connect(url: str, *arguments: Any) -> EngineGroup:
        group = real_connect(url, *arguments)
        if url == engines[1].url and not stuck:
            stuck.append(NeverForms(group._backend, thawed))
            group._backend = stuck[0]
        return group

    monkeypatch.setattr(transport_module, "connect", connect)
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


def test_an_engine_that_refuses_the_group_is_not_waited_for(engines: list[ReceivingDouble], publish: Publish) -> None:
    engines[0].refuses_groups = True
    began = time.monotonic()
    transport = publish(weights(0))
    assert time.monotonic() - began < DEADLINE_S / 2
    assert "Failed to initialize" in transport.failures[0]
    assert same(engines[1].received, weights(0))


def test_groups_with_engines_are_made_under_our_handling_of_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is set before threads make groups at once, and by nobody where NCCL is not used."""
    seen: list[str | None] = []

    class ProcessGroupNCCL:
        """In the place of NCCL, which a CPU lacks."""

        Options = SimpleNamespace

        def __init__(self, *_: object) -> None:
            seen.append(os.environ.get(_ERROR_HANDLING))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", ProcessGroupNCCL, raising=False)
    monkeypatch.setenv(_ERROR_HANDLING, "3")
    nothing: Any = None
    for device, expected in (("cpu", "3"), ("cuda", "0")):
        ProcessGroupTransport(nothing, nothing, torch.device(device), 1.0)
        with monkeypatch.context() as frozen:
            frozen.setattr(os, "putenv", None)
            transport._backend("nccl", None, 2, 0.0)
        assert seen.pop() == expected


new_buffer = partial(torch.empty, dtype=torch.uint8)
DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float32)


def unpacked(bucket: Bucket) -> dict[str, Tensor]:
    """As the receiver does it: views at running offsets, which torch refuses where they are not aligned."""
    found, offset = {}, 0
    for spec in bucket.tensors:
        dtype = getattr(torch, spec.dtype)
        size = torch.Size(spec.shape).numel() * dtype.itemsize
        assert offset % dtype.itemsize == 0, spec.name
        found[spec.name] = bucket.data[offset : offset + size].view(dtype).reshape(spec.shape)
        offset += size
    assert offset == len(bucket.data)
    return found


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(1, 200),
)
def test_every_tensor_arrives_once_in_buckets_that_hold_what_they_may(
    kinds: list[tuple[torch.dtype, int, int]], bucket_bytes: int
) -> None:
    sent = {
        f"tensor.{place}": torch.arange(rows * columns).reshape(rows, columns).to(dtype)
        for place, (dtype, rows, columns) in enumerate(kinds)
    }
    found: dict[str, Tensor] = {}
    for bucket in pack(sent.items(), bucket_bytes, new_buffer):
        assert len(bucket.data) <= bucket_bytes or len(bucket.tensors) == 1
        found |= unpacked(bucket)
    assert found.keys() == sent.keys()
    for name, tensor in sent.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].float(), tensor.float())


def test_memory_that_is_reused_does_not_matter() -> None:
    buffer = torch.zeros(4)

    def stream() -> list[tuple[str, Tensor]]:
        for place in range(3):
            buffer.fill_(place)
            yield str(place), buffer  # type: ignore[misc]

    (bucket,) = pack(stream(), 1 << 10, new_buffer)  # type: ignore[arg-type]
    assert [tensor[0].item() for tensor in unpacked(bucket).values()] == [0, 1, 2]


def test_a_row_is_asked_for_once_the_last_bucket_was_taken() -> None:
    """One row serves all buckets: nothing is written to it before its bucket was sent."""
    row, sizes = torch.empty(100, dtype=torch.uint8), []

    def same_row(num_bytes: int) -> Tensor:
        sizes.append(num_bytes)
        return row[:num_bytes]

    sent = [(str(place), torch.full((10,), float(place))) for place in range(5)]
    for bucket in pack(sent, 80, same_row):
        for name, tensor in unpacked(bucket).items():
            assert tensor[0].item() == int(name)
    assert sizes == [80, 80, 80]


def test_a_call_that_hangs_is_cancelled_with_its_connection() -> None:
    """A connection that stayed open would be reported by the garbage collector, as an error here."""
    with EngineDouble() as engine:
        engine.generate_faults = ["hang"]
        loop, transport = EventLoopThread("test-loop"), Transport(engine.url, None)
        call = loop.start(transport.call("POST", "/generate", deadline_s=60, json={}))
        while "POST /generate" not in engine.calls:
            time.sleep(0.01)
        loop.close()
        assert call.cancelled()
        del loop, call, transport
        gc.collect()


def test_a_coroutine_that_blocks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "CLOSE_DEADLINE_S", 0.1)
    loop, released = EventLoopThread("test-loop"), threading.Event()

    async def block() -> None:
        released.wait(30)

    loop.start(block())
    with pytest.raises(DeadlineExceededError, match=r"test-loop thread did not end in 0\.1 s"):
        loop.close()
    released.set()
    monkeypatch.undo()
    loop.close()
