"""Quantize to e4m3 in blocks with a Triton kernel: bit for bit as formats.py, in a single read of the weight.

A program holds its block in registers, computes the scale, divides and rounds. Not yet run on a GPU. There is no kernel
for one scale per matrix: an fp8_tensor engine receives plain weights and quantizes them itself.

Bits agree on every device because the kernel uses no device's approximations:
- Largest magnitudes are compared as integers. Floats of one sign are ordered as their bits are, and NaN comes out above
  infinity, where a float maximum would drop it.
- Division is the correctly rounded one.
- Values are rounded onto e4m3's grid in float32: adding and subtracting a power of two, whose unit in the last place is
  the grid's step, rounds to nearest, ties to even. The conversion to e4m3 is then exact.
- Nothing is clamped: a quotient exceeds 448 by rounding only, far from the next step of the grid.

A non-finite weight makes its scale non-finite. The host checks the scales of each weight, so that the error can name
it. The check waits for the device for tens of microseconds; sending a weight takes milliseconds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from precision.formats import formats
from precision.formats.rollout_format import BLOCK

_SIGN = tl.constexpr(-(1 << 31))
_MAGNITUDE = tl.constexpr((1 << 31) - 1)
_EXPONENT = tl.constexpr(0xFF << 23)
_SMALLEST_NORMAL = tl.constexpr((127 - 6) << 23)
"""Exponent bits of 2^-6: below it, e4m3's steps grow no smaller."""
_TO_ANCHOR = tl.constexpr((23 - 3) << 23)
"""Offset from a value's exponent to that of the float32 whose unit in the last place is e4m3's step there (3 bits)."""
_E4M3_MAX = tl.constexpr(formats.E4M3_MAX)
_SCALE_FLOOR = tl.constexpr(formats.SCALE_FLOOR)

WARPS = 8


def quantize_block(weight: Tensor, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor]:
    """Quantize a bfloat16, float16 or float32 `weight` [N, K] as formats.quantize_block: (q e4m3, scale_inv f32)."""
    formats.require_matrix(weight)
    weight = weight.detach()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    quantized = torch.empty(weight.shape, dtype=formats.E4M3, device=weight.device)
    grid = tuple(triton.cdiv(size, side) for size, side in zip(weight.shape, block, strict=True))
    scale_inv = torch.empty(grid, dtype=torch.float32, device=weight.device)
    _block_kernel[grid](weight, quantized, scale_inv, *weight.shape, weight.stride(0), **tile(block))
    formats.require_finite(scale_inv * formats.E4M3_MAX)
    return quantized, scale_inv


def tile(block: tuple[int, int]) -> dict[str, int]:
    """Return the compile-time constants of the block kernel."""
    sides = {"BLOCK_ROWS": block[0], "BLOCK_COLUMNS": block[1]}
    powers = {"TILE_ROWS": triton.next_power_of_2(block[0]), "TILE_COLUMNS": triton.next_power_of_2(block[1])}
    return {**sides, **powers, "num_warps": WARPS}


@triton.jit
def _magnitude_bits(values: tl.tensor) -> tl.tensor:
    """Return the int32 bits of |values|, which are float32."""
    return values.to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def _on_grid(values: tl.tensor) -> tl.tensor:
    """Round `values` float32 to e4m3's grid, still in float32; a zero keeps its sign."""
    bits = values.to(tl.int32, bitcast=True)
    anchor = (tl.maximum(bits & _EXPONENT, _SMALLEST_NORMAL) + _TO_ANCHOR).to(tl.float32, bitcast=True)
    rounded = tl.abs(values) + anchor - anchor
    return (rounded.to(tl.int32, bitcast=True) | (bits & _SIGN)).to(tl.float32, bitcast=True)


@triton.jit
def _block_kernel(
    weight: tl.tensor,
    quantized: tl.tensor,
    scales: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    row_stride: tl.tensor,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
) -> None:
    i = tl.arange(0, TILE_ROWS)[:, None]
    j = tl.arange(0, TILE_COLUMNS)[None, :]
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + i
    columns = tl.program_id(1) * BLOCK_COLUMNS + j
    inside = (rows < height) & (i < BLOCK_ROWS) & (columns < width) & (j < BLOCK_COLUMNS)
    values = tl.load(weight + rows * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    amax = tl.max(tl.max(_magnitude_bits(values), 1), 0).to(tl.float32, bitcast=True)
    scale = tl.math.div_rn(amax, _E4M3_MAX)
    scale = tl.where(scale < _SCALE_FLOOR, _SCALE_FLOOR, scale)  # not a maximum: that may lose NaN
    tl.store(scales + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), scale)
    result = _on_grid(tl.math.div_rn(values, scale)).to(quantized.dtype.element_ty)
    tl.store(quantized + rows * width + columns, result, mask=inside)
