"""Buckets in real shared memory, opened by doubles of engines that die, hang and refuse."""

from __future__ import annotations

import inspect
import os
import pickle
import pickletools
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from megatron_bridge.weight_sync import ipc_transport
from megatron_bridge.weight_sync.ipc_transport import Call, IpcTransport, SharedBuffer, cuda_arguments, flattened_bucket
from megatron_bridge.weight_sync.transport import pack
from pipeline.child_process import remove_scratch
from pipeline.errors import FatalError
from tests.doubles.receiving_double import ReceivingDouble, SafeUnpickler
from tests.support.publishing import BUCKET_BYTES, Publish, publisher, same, weights

CPU = torch.device("cpu")
SENDER = """
import sys, torch
from megatron_bridge.weight_sync.ipc_transport import SharedBuffer
buffer = SharedBuffer(1 << 16, torch.device("cpu"))
buffer.lend(1 << 16, readers=3)  # which never come
print(buffer.file, flush=True)
sys.stdin.read()
"""


@contextmanager
def shared(num_bytes: int) -> Iterator[SharedBuffer]:
    buffer = SharedBuffer(num_bytes, CPU)
    try:
        yield buffer
    finally:
        buffer.close()


@pytest.fixture
def publish(engines: list[ReceivingDouble], tmp_path: Path) -> Iterator[Publish]:
    with publisher(engines, tmp_path, IpcTransport) as publish:
        yield publish


def test_each_rank_of_an_engine_opens_the_buffer(
    engines: list[ReceivingDouble], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks open one buffer, again and again: it is lent to each."""
    lend, lent = SharedBuffer.lend, []

    def lend_and_note(buffer: SharedBuffer, num_bytes: int, readers: int) -> Call:
        lent.append(readers)
        return lend(buffer, num_bytes, readers)

    monkeypatch.setattr(SharedBuffer, "lend", lend_and_note)
    with publisher(engines, tmp_path, IpcTransport, ranks=3) as publish:
        publish(weights(0))
        assert publish(weights(1)).failures == {}
    assert same(engines[0].received, weights(1))
    assert [engine.opened for engine in engines] == [3 * len(lent)] * 2
    assert set(lent) == {2 * 3}


def test_one_buffer_serves_all_buckets_and_grows_for_the_largest_tensor(
    engines: list[ReceivingDouble], publish: Publish
) -> None:
    transport = publish(weights(0))
    assert isinstance(transport, IpcTransport)
    buffer = transport._buffer
    publish(weights(1))
    assert transport._buffer is buffer
    sent = weights(2) | {"large": torch.randn(3 * BUCKET_BYTES)} | {"last": torch.randn(4)}
    publish(sent)
    assert same(engines[0].received, {**engines[0].received, **sent})
    assert transport._buffer is not buffer
    assert transport._buffer is not None
    assert len(transport._buffer) == 12 * BUCKET_BYTES


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
    with shared(64) as buffer:
        (bucket,) = pack(tensors, 64, lambda _: buffer.bytes)
        pickled = flattened_bucket(bucket, buffer.lend(len(bucket.data), readers=1))
    common = {"torch.Size", "torch.Tensor", "torch.float32", "torch.bfloat16", "torch.float8_e4m3fn", "torch.uint8"}
    common |= {"types.SimpleNamespace"}
    place = "torch.multiprocessing.reductions."
    opening = {"rebuild_tensor", "rebuild_typed_storage", "rebuild_storage_filename"}
    assert globals_of(pickled) == common | {place + name for name in opening} | {"torch.storage.UntypedStorage"}
    assert globals_of(pickled) == {".".join(known) for known in SafeUnpickler.KNOWN}
    handle = (0, b"memory", 64, 0, b"counter", 3, b"event", True)
    on_gpu = Call(reductions.rebuild_cuda_tensor, *cuda_arguments(handle, "GPU-1", len(bucket.data)))
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
    """By name, against what torch makes of a whole buffer; different are a part's size, the device's UUID (SGLang's
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
    with shared(16) as buffer:
        buffer.bytes.fill_(1)
        opened = SafeUnpickler(BytesIO(pickle.dumps(buffer.lend(8, readers=1)))).load()
        assert buffer.file.exists()
    assert not buffer.file.exists()
    buffer.bytes.fill_(2)
    assert opened.tolist() == [2] * 8, "closed, it is still there for who has it open"


def test_no_room_is_an_error_and_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc_transport.shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 20))
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


LENDS = """
import os, torch
from megatron_bridge.weight_sync.ipc_transport import SharedBuffer
from pipeline.child_process import make_scratch
import tempfile
tempfile.tempdir = str(make_scratch("learner"))
buffer = SharedBuffer(1 << 20, torch.device("cpu"))
print(buffer.file, flush=True)
for child in open(f"/proc/self/task/{os.getpid()}/children").read().split():  # the guard, and torch's own
    os.kill(int(child), 9)
os.kill(os.getpid(), 9)
"""


def test_what_everybody_that_was_killed_has_lent_goes_at_the_next_start(tmp_path: Path) -> None:
    """The guards are killed, too: 256 MiB stayed in /dev/shm, for ever."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    said = subprocess.run([sys.executable, "-c", LENDS], env=environment, timeout=60, capture_output=True, text=True)
    file = Path(said.stdout.split()[0])
    assert file.stat().st_size >= 1 << 20, said.stderr
    try:
        start = "from pipeline.child_process import make_scratch; make_scratch('learner')"
        subprocess.run([sys.executable, "-c", start], env=environment, timeout=60, check=True)
        assert not file.exists()
    finally:
        file.unlink(missing_ok=True)


def test_the_server_of_shared_memory_ends_in_order_after_its_user_and_the_scratch() -> None:
    """It removes its socket last, and aborted with `std::system_error` where that had gone with the folder."""
    lends = "import os, torch; s = torch.zeros(8).untyped_storage(); s._share_filename_cpu_(); os._exit(0)"
    scratch = Path(tempfile.mkdtemp())  # short: a path of a socket has at most 107 bytes
    user = subprocess.Popen(
        [sys.executable, "-c", lends], env={**os.environ, "TMPDIR": str(scratch)}, stderr=subprocess.PIPE, text=True
    )
    with user:
        user.wait(60)
        assert list(scratch.glob("*/manager.sock"))
        remove_scratch(scratch)
        assert user.stderr is not None
        assert user.stderr.read() == "", "the server, which has the other end, ended otherwise"
    remove_scratch(scratch)
    assert not scratch.exists()
