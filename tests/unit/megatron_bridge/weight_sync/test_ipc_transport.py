"""Buckets in real shared memory, opened by doubles of engines that die, hang and refuse."""

from __future__ import annotations

import inspect
import os
import pickle
import pickletools
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from megatron_bridge.weight_sync import shared_buffer
from megatron_bridge.weight_sync.buckets import Bucket, pack
from megatron_bridge.weight_sync.ipc_transport import IpcTransport, flattened_bucket
from megatron_bridge.weight_sync.shared_buffer import Call, SharedBuffer, cuda_arguments
from pipeline.errors import FatalError
from tests.doubles.receiving_double import BucketFault, ReceivingDouble, SafeUnpickler
from tests.support.feeding import BUCKET_BYTES, DEADLINE_S, Publish, publisher, same, weights

CPU = torch.device("cpu")
SENDER = """
import sys, torch
from megatron_bridge.weight_sync.shared_buffer import SharedBuffer
row = SharedBuffer(1 << 16, torch.device("cpu"))
row.lend(1 << 16, readers=3)  # which never come
print(row.file, flush=True)
sys.stdin.read()
"""


@contextmanager
def shared(num_bytes: int) -> Iterator[SharedBuffer]:
    row = SharedBuffer(num_bytes, CPU)
    try:
        yield row
    finally:
        row.close()


@pytest.fixture
def engines() -> Iterator[list[ReceivingDouble]]:
    with ExitStack() as stack:
        yield [stack.enter_context(ReceivingDouble()) for _ in range(2)]


@pytest.fixture
def publish(engines: list[ReceivingDouble], tmp_path: Path) -> Iterator[Publish]:
    with publisher(engines, tmp_path, IpcTransport) as publish:
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
        wire = publish(sent)
        assert wire.failures == {}
        assert all(same(engine.received, sent) for engine in engines)
        assert wire.sent_bytes == 2 * sum(tensor.nbytes for tensor in sent.values())


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
    assert engines[1].opened == 2
    if fault != "hang":
        engines[1].bucket_fault = None
        assert publish(weights(1)).failures == {}
        assert all(same(engine.received, weights(1)) for engine in engines)


def test_an_engine_is_not_charged_for_waiting_on_another(engines: list[ReceivingDouble], publish: Publish) -> None:
    """Six buckets of 0.9 s: more than DEADLINE_S, which ends engine 0 in its third and leaves engine 1 alone."""
    engines[0].bucket_s = 0.9
    wire = publish(weights(0))
    assert wire.failures.keys() == {0}
    assert same(engines[1].received, weights(0))


def test_a_restarted_engine_and_one_that_is_gone(engines: list[ReceivingDouble], publish: Publish) -> None:
    publish(weights(0))
    engines[0].restart()
    assert publish(weights(1)).failures == {}
    assert same(engines[0].received, weights(1))
    engines[0].stop()
    wire = publish(weights(2))
    assert wire.failures == {}
    assert wire.engines == (1,)
    assert same(engines[1].received, weights(2))


def test_each_rank_of_an_engine_opens_the_row(
    engines: list[ReceivingDouble], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks open one row, again and again: it is lent to each."""
    lend, lent = SharedBuffer.lend, []

    def lend_and_note(row: SharedBuffer, num_bytes: int, readers: int) -> Call:
        lent.append(readers)
        return lend(row, num_bytes, readers)

    monkeypatch.setattr(SharedBuffer, "lend", lend_and_note)
    with publisher(engines, tmp_path, IpcTransport, ranks=3) as publish:
        publish(weights(0))
        assert publish(weights(1)).failures == {}
    assert same(engines[0].received, weights(1))
    assert [engine.opened for engine in engines] == [3 * len(lent)] * 2
    assert set(lent) == {2 * 3}


def test_one_row_serves_all_buckets_and_grows_for_the_largest_tensor(
    engines: list[ReceivingDouble], publish: Publish
) -> None:
    wire = publish(weights(0))
    assert isinstance(wire, IpcTransport)
    row = wire._row
    publish(weights(1))
    assert wire._row is row
    sent = weights(2) | {"large": torch.randn(3 * BUCKET_BYTES)} | {"last": torch.randn(4)}
    publish(sent)
    assert same(engines[0].received, {**engines[0].received, **sent})
    assert wire._row is not row
    assert wire._row is not None
    assert len(wire._row) == 12 * BUCKET_BYTES


def test_a_row_of_another_is_refused() -> None:
    feed: Any = SimpleNamespace(ranks_per_engine=1)
    wire = IpcTransport(feed, None, [0], CPU, 1.0)  # type: ignore[arg-type]
    wire.open({})
    wire.new_row(10)
    with pytest.raises(AssertionError, match="was not packed into new_row"):
        wire.send(Bucket((), torch.empty(10, dtype=torch.uint8)))
    wire.close()


def globals_of(pickled: bytes) -> set[str]:
    """Whatever a pickle of protocol 4 names: the two strings before each STACK_GLOBAL."""
    strings, memo, found = [], [], set()
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in ("SHORT_BINUNICODE", "BINUNICODE"):
            strings.append(argument)
        elif opcode.name == "MEMOIZE":
            memo.append(strings[-1] if strings else "")
        elif opcode.name in ("BINGET", "LONG_BINGET"):
            strings.append(memo[argument])
        elif opcode.name == "STACK_GLOBAL":
            found.add(".".join(strings[-2:]))
        assert opcode.name != "GLOBAL"
    return found


def test_the_pickle_names_what_sglang_lets_through_and_nothing_else() -> None:
    tensors = [("a", torch.ones(4)), ("b", torch.ones(4).bfloat16()), ("c", torch.ones(4).to(torch.float8_e4m3fn))]
    with shared(64) as row:
        (bucket,) = pack(tensors, 64, lambda _: row.bytes)
        pickled = flattened_bucket(bucket, row.lend(len(bucket.row), readers=1))
    common = {"torch.Size", "torch.Tensor", "torch.float32", "torch.bfloat16", "torch.float8_e4m3fn", "torch.uint8"}
    common |= {"types.SimpleNamespace"}
    place = "torch.multiprocessing.reductions."
    opening = {"rebuild_tensor", "rebuild_typed_storage", "rebuild_storage_filename"}
    assert globals_of(pickled) == common | {place + name for name in opening} | {"torch.storage.UntypedStorage"}
    assert globals_of(pickled) == {".".join(known) for known in SafeUnpickler.KNOWN}
    handle = (0, b"memory", 64, 0, b"counter", 3, b"event", True)
    on_gpu = Call(reductions.rebuild_cuda_tensor, *cuda_arguments(handle, "GPU-1", len(bucket.row)))
    found = globals_of(flattened_bucket(bucket, on_gpu))
    assert found == common | {place + "rebuild_cuda_tensor", "torch.storage.TypedStorage"}


class FakeStorage:
    """A storage of a GPU, as far as torch's own reduce_tensor looks at it."""

    device = SimpleNamespace(type="cuda")

    def __init__(self) -> None:
        self._untyped_storage = self

    def _weak_ref(self) -> int:
        return torch.empty(1).untyped_storage()._weak_ref()

    def _share_cuda_(self) -> tuple[Any, ...]:
        return (5, b"memory", 4096, 512, b"counter", 3, b"event", True)


class FakeTensor:
    """uint8 [4096] in a FakeStorage."""

    requires_grad, is_nested, layout, dtype, _backward_hooks = False, False, torch.strided, torch.uint8, None

    def __init__(self) -> None:
        self._storage = FakeStorage()

    def _typed_storage(self) -> FakeStorage:
        return self._storage

    def size(self) -> torch.Size:
        return torch.Size([4096])

    def stride(self) -> tuple[int, ...]:
        return (1,)

    def storage_offset(self) -> int:
        return 0


def test_arguments_on_a_gpu_are_those_that_torch_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, against torch's own reduction of a whole row; different are a part's size, the device's UUID (SGLang's
    way to name it) and that no event is waited for."""
    monkeypatch.setattr(torch.utils.hooks, "warn_if_has_hooks", lambda _: None)
    monkeypatch.setattr(reductions, "shared_cache", {})
    tensor = FakeTensor()
    function, theirs = reductions.reduce_tensor(tensor)
    assert function is reductions.rebuild_cuda_tensor
    signature = inspect.signature(function)
    expected = signature.bind(*theirs).arguments
    assert expected["storage_device"] == 5
    expected |= dict(tensor_cls=torch.Tensor, storage_cls=torch.storage.TypedStorage)
    expected |= dict(tensor_size=(100,), storage_device="GPU-1", event_sync_required=False)
    found = signature.bind(*cuda_arguments(tensor._storage._share_cuda_(), "GPU-1", 100)).arguments
    assert found == expected


def test_what_is_written_later_is_seen_by_who_has_it_open() -> None:
    with shared(16) as row:
        row.bytes.fill_(1)
        opened = SafeUnpickler(BytesIO(pickle.dumps(row.lend(8, readers=1)))).load()
        assert row.file.exists()
    assert not row.file.exists()
    row.bytes.fill_(2)
    assert opened.tolist() == [2] * 8, "closed, it is still there for who has it open"


def test_no_room_is_an_error_and_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_buffer.shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 20))
    with pytest.raises(FatalError, match=r"64 MiB free, 65 MiB are needed .* weights.bucket_mib"):
        SharedBuffer((64 << 20) + 1, CPU)


def test_a_sender_that_was_killed_leaves_nothing_behind() -> None:
    sender = subprocess.Popen(
        [sys.executable, "-c", SENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ
    )
    with sender:
        assert sender.stdout is not None
        file = Path(sender.stdout.readline().decode().strip())
        assert file.exists()
        sender.send_signal(signal.SIGKILL)
    ends = time.monotonic() + 60
    while file.exists():
        assert time.monotonic() < ends, f"{file} is still there"
        time.sleep(0.05)
