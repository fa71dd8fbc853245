"""Tensors packed into byte rows of bounded size, in SGLang's `flattened_bucket` layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.ports import TensorSpec


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together."""

    tensors: tuple[TensorSpec, ...]
    row: Tensor
    """uint8 [bytes]: the tensors' bytes in C order, one after the other."""


def pack(named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Buckets of at most `bucket_bytes`, in the order of the stream; a larger tensor travels alone.

    A tensor's bytes are copied before the next one is asked for: an exporter may reuse its memory.
    """
    waiting: list[tuple[TensorSpec, Tensor]] = []
    size = 0
    for name, tensor in named_tensors:
        spec = TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        row = tensor.detach().contiguous().flatten().view(torch.uint8)
        if waiting and size + len(row) > bucket_bytes:
            yield _bucket(waiting)
            waiting, size = [], 0
        waiting.append((spec, row.clone()))
        size += len(row)
    if waiting:
        yield _bucket(waiting)


def _bucket(tensors: list[tuple[TensorSpec, Tensor]]) -> Bucket:
    # The receiver views its bytes as tensors, so each must start at a multiple of its element's size: wide ones first.
    ordered = sorted(tensors, key=lambda pair: -getattr(torch, pair[0].dtype).itemsize)
    return Bucket(tuple(spec for spec, _ in ordered), torch.cat([row for _, row in ordered]))
