"""Buckets handed over as memory that the engines open: learner and engines share a machine and its GPUs.

Each rank keeps one shared buffer for as long as the channel lives, as large as a bucket or the largest tensor. All
engines of the rank read the same buffer, through one CUDA IPC handle whatever the number of tensors. Ranks of an
engine on other GPUs read it by peer access. An engine answers when all its ranks have copied their shares into their
weights (rollout_sglang.server.launch_server has them wait for their GPUs); then the buffer may be written again. An
engine that failed may still be reading, and so mix two buckets: it claims no version until it has been given all
weights anew.

Every engine process must see the sender's GPU (CUDA_VISIBLE_DEVICES; in containers also /dev/shm).
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.hf.tensor_specs import num_bytes, torch_dtype
from megatron_bridge.weight_sync.buckets import Bucket
from megatron_bridge.weight_sync.shared_buffer import SharedBuffer
from megatron_bridge.weight_sync.transport import Transfer, WeightTransport
from pipeline.data.membership import Member
from pipeline.errors import RetryableError

PICKLE_PROTOCOL = 4
"""That of torch's own serializers; every supported Python reads it."""


@dataclass(eq=False)
class IpcTransport(WeightTransport):
    """One shared buffer, opened by every engine."""

    _buffer: SharedBuffer | None = field(init=False, default=None)

    @property
    def engines(self) -> tuple[int, ...]:
        """See WeightTransport."""
        return tuple(self._left_s)

    def new_buffer(self, num_bytes: int) -> Tensor:
        """The same each time, unless it is too small; so the bucket before is waited for."""
        self.finish()
        if self._buffer is None or len(self._buffer) < num_bytes:
            self.close()
            self._buffer = SharedBuffer(num_bytes, self._device)
        return self._buffer.bytes

    def close(self) -> None:
        """See WeightTransport."""
        if self._buffer is not None:
            self._buffer.close()
        self._buffer = None

    def _meet(self, engines: Sequence[Member]) -> None:
        """Nothing to be done: an engine opens the buffer with each bucket."""

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
            await self._session.receive_shared(engine, pickled, self._bucket_deadline_s(engine))
        except RetryableError as error:
            failure = str(error)
        return Transfer(seconds=time.monotonic() - began, failure=failure)

    def _fail(self, engine: int, why: str) -> None:
        self.failures[engine] = why
        del self._left_s[engine]


def flattened_bucket(bucket: Bucket, opener: Any) -> bytes:
    """A bucket as SGLang's /update_weights_from_tensor takes it, where `opener` pickles as its data.

    SGLang reads a pickle here and nothing else. This one names nothing but torch's functions that open shared memory,
    torch's dtypes and torch.Size, and SimpleNamespace where SGLang itself puts a class of its own.
    """
    metadata, start = [], 0
    for spec in bucket.tensors:
        shape, dtype = torch.Size(spec.shape), torch_dtype(spec)
        end = start + num_bytes(spec)
        metadata.append(
            SimpleNamespace(name=spec.name, shape=shape, dtype=dtype, start_idx=start, end_idx=end, numel=end - start)
        )
        start = end
    return pickle.dumps({"flattened_tensor": opener, "metadata": metadata}, PICKLE_PROTOCOL)
