"""Tensors packed into byte buffers of bounded size, in SGLang's `flattened_bucket` layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_bridge.hf.tensor_specs import spec_of
from pipeline.ports.weights import TensorSpec

PIECES = 8
"""What is packed first and what is loaded last has nothing beside it: at most an eighth each."""
SMALLEST_BYTES = 16 << 20
"""Each bucket costs an engine one call, but eight were faster than one. The least size is chosen, not
measured: glibc in the engines hands out a buffer of up to 32 MiB again, and takes a larger one from the system each
time, page by page."""


def bucket_size(share_bytes: int, largest_bytes: int) -> int:
    """In how large buckets `share_bytes` are sent, so that gathering, packing, sending and loading go on side by side;
    0 bytes are not known."""
    if not share_bytes:
        return largest_bytes
    return min(largest_bytes, max(SMALLEST_BYTES, share_bytes // PIECES))


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent in one transfer."""

    tensors: tuple[TensorSpec, ...]
    data: Tensor
    """uint8 [bytes]: the tensors' bytes in C order, one after the other."""


def pack(
    named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int, new_buffer: Callable[[int], Tensor]
) -> Iterator[Bucket]:
    """Buckets of at most `bucket_bytes`, in the order of the stream; a larger tensor has one of its own.

    `new_buffer` gives uint8 [at least so many bytes] for each bucket. It may give the same again once the next bucket
    is asked for. A tensor's bytes are copied, once, before the next tensor is asked for: an exporter may reuse its
    memory.
    """
    specs: list[TensorSpec] = []
    buffer, size = torch.empty(0, dtype=torch.uint8), 0
    for name, tensor in named_tensors:
        source = tensor.detach().contiguous().flatten().view(torch.uint8)
        # The receiver views its bytes as tensors, so each must start at a multiple of its element's size.
        if specs and (size + len(source) > bucket_bytes or size % tensor.itemsize):
            yield Bucket(tuple(specs), buffer[:size])
            specs, size = [], 0
        if not specs:
            buffer = new_buffer(max(bucket_bytes, len(source)))
        _copy(source, buffer[size : size + len(source)])
        specs.append(spec_of(name, tensor))
        size += len(source)
    if specs:
        yield Bucket(tuple(specs), buffer[:size])


def _copy(source: Tensor, target: Tensor) -> None:
    """In host memory by this thread alone: torch would share each tensor out among its threads, which the engine's
    loading, the hashing and the probe need."""
    if source.device.type == target.device.type == "cpu":
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source)
