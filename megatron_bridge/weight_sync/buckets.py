"""Tensors packed into byte rows of bounded size, in SGLang's `flattened_bucket` layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_bridge.hf.tensor_specs import spec_of
from pipeline.ports.weight_update import TensorSpec


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together."""

    tensors: tuple[TensorSpec, ...]
    row: Tensor
    """uint8 [bytes]: the tensors' bytes in C order, one after the other."""


def pack(
    named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int, new_row: Callable[[int], Tensor]
) -> Iterator[Bucket]:
    """Buckets of at most `bucket_bytes`, in the order of the stream; a larger tensor travels alone.

    `new_row` gives uint8 [at least so many bytes] for each bucket; it may give the same again once the next bucket is
    asked for. A tensor's bytes are copied, once, before the next tensor is asked for: an exporter may reuse its memory.
    """
    specs: list[TensorSpec] = []
    row, size = torch.empty(0, dtype=torch.uint8), 0
    for name, tensor in named_tensors:
        source = tensor.detach().contiguous().flatten().view(torch.uint8)
        # The receiver views its bytes as tensors, so each must start at a multiple of its element's size.
        if specs and (size + len(source) > bucket_bytes or size % tensor.itemsize):
            yield Bucket(tuple(specs), row[:size])
            specs, size = [], 0
        if not specs:
            row = new_row(max(bucket_bytes, len(source)))
        row[size : size + len(source)].copy_(source)
        specs.append(spec_of(name, tensor))
        size += len(source)
    if specs:
        yield Bucket(tuple(specs), row[:size])
