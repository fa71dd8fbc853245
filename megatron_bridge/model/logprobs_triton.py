"""Compute log-probabilities' statistics and gradients in two Triton kernels: one reads, one reads and writes.

The back end of `logprobs` for logits on a GPU. One H200 ran it; the arithmetic runs in Triton's interpreter too.

A program owns a row and walks along it. Each lane reads `_VECTOR_BYTES` of every stretch of the row and keeps its own
statistics in float32 registers: no lane waits for another before the row's end, and the logits are copied to no other
precision. Exponents are taken to base 2, with y = z × log2(e) / T:

    m = max y        s = Σ 2^(y - m)        w = Σ 2^(y - m) (y - m)

When a larger value moves a lane's m to m', with d = m - m' ≤ 0, the sums are rebased without another read:

    Σ 2^(y - m')          = 2^d Σ 2^(y - m)                 = 2^d s
    Σ 2^(y - m') (y - m') = 2^d Σ 2^(y - m) ((y - m) + d)   = 2^d (w + d s)

At the row's end the lanes' statistics are rebased onto the largest m in the same way, and added.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-1e30)
"""A stand-in for -inf that avoids 0 × -inf and inf - inf; 2 to this power is 0."""
LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))

_VECTOR_BYTES = 16
"""The widest load of one thread."""
_LANES = 256
_WARPS = 8
"""256 threads, each with a load of 16 bytes under way; compiled for an H100, 8 programs fill a multiprocessor. One H200
took .584 ms so for 2.49 GB, as long as a copy, and .637 ms with 512 lanes. 9 instructions a number; 3.35 TB/s leave
room for 17."""


def statistics(rows: Tensor, wanted: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return `logprobs.statistics` of `rows` [tokens, vocab/tp] in bfloat16, float16 or float32, of unit stride."""
    peak = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
    sums = peak.new_empty(len(rows), 3)
    if len(rows):
        arguments = (rows, wanted, peak, sums, rows.stride(0), math.log2(math.e) / temperature)
        _statistics_kernel[(len(rows),)](*arguments, **tile(rows.shape[1], rows.element_size()))
    return peak, sums.T


def write_gradient(
    rows: Tensor, wanted: Tensor, normalizer: Tensor, scale: Tensor, temperature: float, target: Tensor
) -> None:
    """Fill `target` as `logprobs.write_gradient` does; rows of `scale` 0 are not read."""
    if len(rows):
        strides = (rows.stride(0), target.stride(0))
        arguments = (rows, wanted, normalizer, scale, target, *strides, math.log2(math.e) / temperature)
        _gradient_kernel[(len(rows),)](*arguments, **tile(rows.shape[1], rows.element_size()))
    torch.autograd.graph.increment_version(target)  # autograd does not see the kernel's write


def tile(vocab: int, element_bytes: int) -> dict[str, int]:
    """Return the kernels' compile-time constants."""
    return {"VOCAB": vocab, "LANES": _LANES, "VECTOR": _VECTOR_BYTES // element_bytes, "num_warps": _WARPS}


@triton.jit
def _absorb(values: tl.tensor, base2: tl.tensor, peak: tl.tensor, total: tl.tensor, weighted: tl.tensor) -> tl.tensor:
    """Return the lanes' statistics [LANES] after they have also read `values` [LANES, VECTOR]."""
    higher = tl.maximum(peak, tl.max(values, 1) * base2)
    drop = peak - higher
    keep = tl.exp2(drop)
    shifted = tl.fma(values, base2, -higher[:, None])
    weight = tl.exp2(shifted)
    weighted = keep * (weighted + drop * total) + tl.sum(weight * tl.maximum(shifted, LOWEST), 1)
    return higher, keep * total + tl.sum(weight, 1), weighted


@triton.jit
def _statistics_kernel(
    rows: tl.tensor,
    wanted: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    row_stride: tl.tensor,
    base2: tl.tensor,
    VOCAB: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits = rows + row * row_stride
    columns = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    peak = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    weighted = tl.zeros([LANES], tl.float32)
    for start in range(0, VOCAB - VOCAB % (LANES * VECTOR), LANES * VECTOR):
        values = tl.load(logits + start + columns).to(tl.float32)
        peak, total, weighted = _absorb(values, base2, peak, total, weighted)
    if VOCAB % (LANES * VECTOR):
        columns += VOCAB - VOCAB % (LANES * VECTOR)
        values = tl.load(logits + columns, mask=columns < VOCAB, other=-float("inf")).to(tl.float32)
        peak, total, weighted = _absorb(values, base2, peak, total, weighted)
    top = tl.max(peak, 0)
    drop = peak - top
    keep = tl.exp2(drop)
    tl.store(peaks + row, top * LN_2)
    sums += 3 * row
    tl.store(sums, tl.sum(keep * total, 0))
    token = tl.load(wanted + row)
    here = (token >= 0) & (token < VOCAB)
    logit = tl.load(logits + token, mask=here, other=0.0).to(tl.float32)
    tl.store(sums + 1, tl.where(here, tl.fma(logit, base2, -top) * LN_2, 0.0))
    tl.store(sums + 2, tl.sum(keep * (weighted + drop * total), 0) * LN_2)


@triton.jit
def _gradient_kernel(
    rows: tl.tensor,
    wanted: tl.tensor,
    normalizers: tl.tensor,
    scales: tl.tensor,
    target: tl.tensor,
    row_stride: tl.tensor,
    target_stride: tl.tensor,
    base2: tl.tensor,
    VOCAB: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits = rows + row * row_stride
    target += row * target_stride
    lanes = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    scale = tl.load(scales + row)
    token = tl.load(wanted + row)
    normalizer = tl.load(normalizers + row) * LOG2_E
    for start in range(0, VOCAB, LANES * VECTOR):
        columns = start + lanes
        inside = columns < VOCAB
        if scale == 0:  # a prompt or padding: most rows of many batches
            gradient = tl.zeros([LANES, VECTOR], tl.float32)
        else:
            values = tl.load(logits + columns, mask=inside).to(tl.float32)
            probability = tl.exp2(tl.fma(values, base2, -normalizer))
            gradient = scale * (tl.where(columns == token, 1.0, 0.0) - probability)
        tl.store(target + columns, gradient.to(target.dtype.element_ty), mask=inside)
