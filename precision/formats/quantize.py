"""Which implementation quantizes a published weight: a kernel where the weight is on a GPU, else torch."""

from __future__ import annotations

from torch import Tensor

from precision.formats import formats


def quantize_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    """precision.formats.formats.quantize_block in 128x128 blocks, on the device that holds `weight` [N, K]."""
    if not weight.is_cuda:
        return formats.quantize_block(weight)
    from precision.formats import quantize_triton  # only where there is Triton

    return quantize_triton.quantize_block(weight)
