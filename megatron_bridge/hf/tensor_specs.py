"""Names, dtypes and sizes of tensors as files, manifests and engines state them, and as torch has them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pipeline.ports.weights import TensorSpec


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """What describes `tensor` under this name."""
    return TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """The dtype that `spec.dtype` names."""
    dtype = getattr(torch, spec.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def num_bytes(spec: TensorSpec) -> int:
    """Bytes of all values."""
    return math.prod(spec.shape) * torch_dtype(spec).itemsize
