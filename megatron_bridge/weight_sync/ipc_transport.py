"""Hand buckets to engines as memory that they open: learner and engines share a machine and its GPUs.

Each rank keeps one shared buffer for the channel's lifetime, as large as a bucket or the largest tensor. All engines of
the rank read it through one CUDA IPC handle, whatever the number of tensors; an engine's ranks on other GPUs read it by
peer access, each with a context on the sender's GPU. An engine answers when all its ranks have copied their shares into
their weights (rollout_sglang.server.launch_server has them wait for their GPUs); then the buffer may be written again.
An engine that failed may still be reading, and so mix two buckets: it claims no version until it has received all
weights anew.

Every engine process must see the sender's GPU (CUDA_VISIBLE_DEVICES; in containers also /dev/shm).
"""

from __future__ import annotations

import pickle
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.multiprocessing import reductions
from torch.storage import TypedStorage

from megatron_bridge.hf.tensor_files import num_bytes, torch_dtype
from megatron_bridge.weight_sync.transport import BUCKET_DEADLINE_S, Bucket, Transfer, WeightTransport
from pipeline.errors import FatalError, RetryableError

PICKLE_PROTOCOL = 4
"""The protocol of torch's own serializers, which every supported Python reads."""


@dataclass(eq=False)
class IpcTransport(WeightTransport):
    """A transport with one shared buffer that every engine opens."""

    _buffer: SharedBuffer | None = field(init=False, default=None)

    def new_buffer(self, num_bytes: int) -> Tensor:
        """Return the shared buffer, enlarged if necessary, after the bucket before has ended."""
        self.finish()
        if self._buffer is None or len(self._buffer) < num_bytes:
            self.close()
            self._buffer = SharedBuffer(num_bytes, self._device)
        return self._buffer.bytes

    def close(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
        self._buffer = None

    def _begin(self, bucket: Bucket) -> dict[int, Future[Transfer]]:
        if not self._left_s:
            return {}
        buffer = self._buffer
        assert buffer is not None, "new_buffer comes first"
        assert buffer.bytes.data_ptr() == bucket.data.data_ptr(), "the bucket was not packed into new_buffer"
        lent = buffer.lend(len(bucket.data), readers=len(self._left_s) * self._session.ranks_per_engine)
        pickled = flattened_bucket(bucket, lent)
        return {engine: self._event_loop.start(self._hand_over(engine, pickled)) for engine in self._left_s}

    async def _hand_over(self, engine: int, pickled: bytes) -> Transfer:
        began, failure = time.monotonic(), None
        try:
            await self._session.receive_shared(engine, pickled, min(BUCKET_DEADLINE_S, self._left_s[engine]))
        except RetryableError as error:
            failure = str(error)
        return Transfer(seconds=time.monotonic() - began, failure=failure)


def flattened_bucket(bucket: Bucket, opener: Any) -> bytes:
    """Return a bucket as SGLang's /update_weights_from_tensor takes it; `opener` pickles as the bucket's data. SGLang
    reads only pickles here. This pickle names only torch's functions that open shared memory, torch's dtypes and
    torch.Size, and SimpleNamespace in place of a class of SGLang's."""
    metadata, start = [], 0
    for spec in bucket.tensors:
        shape, dtype = torch.Size(spec.shape), torch_dtype(spec)
        end = start + num_bytes(spec)
        metadata.append(
            SimpleNamespace(name=spec.name, shape=shape, dtype=dtype, start_idx=start, end_idx=end, numel=end - start)
        )
        start = end
    return pickle.dumps({"flattened_tensor": opener, "metadata": metadata}, PICKLE_PROTOCOL)


SHARED_MEMORY = Path("/dev/shm")
"""The folder of torch's shared memory; a container's default is 64 MiB."""


class Call:
    """An object that pickles as a call: unpickling calls the function and returns its result."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function = function
        self.arguments = arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self.arguments


class SharedBuffer:
    """uint8 [num_bytes] on `device`, shared with other processes until `close`."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raise FatalError if shared memory has no room: writing to it would end the process."""
        self._device = device
        self._guard: subprocess.Popen[bytes] | None = None
        if device.type == "cpu":
            free = shutil.disk_usage(SHARED_MEMORY).free
            if free < num_bytes:
                raise FatalError(
                    f"{SHARED_MEMORY} has {free >> 20} MiB free, {-(-num_bytes >> 20)} MiB are needed to hand weights "
                    "over; lower weights.bucket_mib, or give the container more (--shm-size)"
                )
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._storage = cast(Any, self.bytes.untyped_storage())  # torch does not annotate the sharing methods
        self._handle: tuple[Any, ...]
        if device.type == "cuda":
            self._handle = self._storage._share_cuda_()
        else:
            self._handle = self._storage._share_filename_cpu_()
            self._storage._shared_incref()  # torch leaves deletion to the guard
            noted = Path(tempfile.gettempdir()) / self.file.name
            noted.touch()
            # The guard deletes both files when its input ends: this process closes the pipe, or dies.
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", 'read -r _; rm -f -- "$@"', "sh", str(self.file), str(noted)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # signals to this process's group do not reach the guard
            )

    def __len__(self) -> int:
        return len(self.bytes)

    @property
    def file(self) -> Path:
        """The file of shared memory; on a CPU only."""
        return SHARED_MEMORY / str(self._handle[1], "ascii").lstrip("/")

    def lend(self, num_bytes: int, readers: int) -> Call:
        """Return an object that unpickles as the first `num_bytes`, uint8 [num_bytes], in another process of this
        machine. Each of `readers` processes must unpickle it once. They share the memory: they see later writes."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
            device_uuid = str(torch.cuda.get_device_properties(self._device).uuid)
            return Call(reductions.rebuild_cuda_tensor, *cuda_arguments(self._handle, device_uuid, num_bytes))
        for _ in range(readers):
            self._storage._shared_incref()  # an opener counts itself and removes this count
        opened = Call(reductions.rebuild_storage_filename, torch.UntypedStorage, *self._handle)
        typed = Call(reductions.rebuild_typed_storage, opened, torch.uint8)
        return Call(reductions.rebuild_tensor, torch.Tensor, typed, (0, (num_bytes,), (1,), False))

    def close(self) -> None:
        """Stop other processes from opening the buffer. A process that has it open keeps the memory."""
        if self._guard is not None:
            self._guard.communicate()


def cuda_arguments(handle: tuple[Any, ...], device_uuid: str, num_bytes: int) -> tuple[Any, ...]:
    """Return the arguments of torch's `rebuild_cuda_tensor` for a `handle` from `_share_cuda_`. SGLang finds the device
    by `device_uuid`, because processes that see different devices number them differently."""
    _, memory, storage_bytes, offset_bytes, counter, counter_offset, event, _ = handle
    return (
        torch.Tensor,
        (num_bytes,),
        (1,),
        0,
        TypedStorage,
        torch.uint8,
        device_uuid,
        memory,
        storage_bytes,
        offset_bytes,
        False,
        # Counters of readers, by which torch reuses memory that its owner dropped; this owner keeps it.
        counter,
        counter_offset,
        event,
        False,  # no wait for the event, which was recorded at sharing: `lend` has waited for later work
    )
