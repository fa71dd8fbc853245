"""Quantize to e4m3 in blocks with a Triton kernel: bit for bit as formats.py, in a single read of the weight.

A program reads its block once, holds it in registers as it came, computes the scale, divides and rounds. There is no
kernel for one scale per matrix: an fp8_tensor engine receives plain weights and quantizes them itself.

Bits agree with formats.py because every step has one right answer:
- Largest magnitudes are compared as integers. Floats of one sign are ordered as their bits are, and NaN comes out above
  infinity, where a float maximum would drop it.
- Quotients are correctly rounded, though a program divides but twice. With y = 1/s correctly rounded, q = w·y is off
  by two units at most, and q + (w − q·s)·y by fused multiply-adds is w/s correctly rounded where q was off by less than
  one (Markstein, IBM J. Res. Dev. 34 (1990), 111). bfloat16 and float16 have it after one such step: tried for every
  pair of significands. float32 takes two.
- The conversion to e4m3 (PTX: cvt.rn.satfinite.e4m3x2.f32) rounds to nearest, ties to even, and keeps a zero's sign.

Dividing each number takes 29 instructions for it, one after the other; this takes 12. So divided, a matrix took an H200
2.9 to 3.9 times as long as a copy; this way has not run on a GPU.

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
_E4M3_MAX = tl.constexpr(formats.E4M3_MAX)
_SCALE_FLOOR = tl.constexpr(formats.SCALE_FLOOR)

WARPS = 8
REGISTERS = 80
"""Of a thread, so that three programs share a multiprocessor: while one computes, others load."""


def quantize_block(weight: Tensor, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor]:
    """Quantize a bfloat16, float16 or float32 `weight` [N, K] as formats.quantize_block: (q e4m3, scale_inv f32)."""
    formats.require_matrix(weight)
    weight = weight.detach()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    quantized = torch.empty(weight.shape, dtype=formats.E4M3, device=weight.device)
    grid = tuple(triton.cdiv(size, side) for size, side in zip(weight.shape, block, strict=True))
    scale_inv = torch.empty(grid, dtype=torch.float32, device=weight.device)
    _block_kernel[grid](weight, quantized, scale_inv, *weight.shape, weight.stride(0), **tile(block))
    formats.require_finite(scale_inv)
    return quantized, scale_inv


def tile(block: tuple[int, int]) -> dict[str, int]:
    """Return the compile-time constants of the block kernel."""
    sides = {"BLOCK_ROWS": block[0], "BLOCK_COLUMNS": block[1]}
    powers = {"TILE_ROWS": triton.next_power_of_2(block[0]), "TILE_COLUMNS": triton.next_power_of_2(block[1])}
    return {**sides, **powers, "num_warps": WARPS, "maxnreg": REGISTERS}


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
    row, column = tl.program_id(0).to(tl.int64) * BLOCK_ROWS, tl.program_id(1) * BLOCK_COLUMNS
    inside = (i < tl.minimum(BLOCK_ROWS, height - row)) & (j < tl.minimum(BLOCK_COLUMNS, width - column))
    loaded = tl.load(weight + row * row_stride + column + (i * row_stride + j), mask=inside, other=0.0)
    is_short: tl.constexpr = loaded.dtype.primitive_bitwidth == 16
    integer: tl.constexpr = tl.int16 if is_short else tl.int32
    magnitude: tl.constexpr = (1 << 15) - 1 if is_short else (1 << 31) - 1
    peak = tl.max(loaded.to(integer, bitcast=True) & magnitude)
    amax = peak.to(integer).to(loaded.dtype, bitcast=True).to(tl.float32)
    scale = tl.math.div_rn(amax, _E4M3_MAX)
    scale = tl.where(scale < _SCALE_FLOOR, _SCALE_FLOOR, scale)  # not a maximum: that may lose NaN
    tl.store(scales + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), scale)
    inverse = tl.math.div_rn(1.0, scale)
    values = loaded.to(tl.float32)  # only here: until now two numbers share a register
    quotient = values * inverse
    for _ in tl.static_range(1 if is_short else 2):
        quotient = tl.math.fma(tl.math.fma(quotient, -scale, values), inverse, quotient)
    sign = values.to(tl.int32, bitcast=True) & _SIGN  # the sums above make -0 to 0
    signed = (quotient.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    tl.store(quantized + row * width + column + (i * width + j), signed.to(quantized.dtype.element_ty), mask=inside)
