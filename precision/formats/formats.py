"""Quantize weights and activations, with the same functions for the engine's emulation and the learner's.

e4m3 ("fn": no infinities, largest value 448, 3 mantissa bits) has a half-ulp of at most 2^-4 of the value down to 2^-6,
and steps of 2^-9 below. A scale maps the largest magnitude of a tensor, block or group to 448:

    scale = max(amax / 448, 1e-12),   q = e4m3(clamp(w / scale, -448, 448)),   w' = q * scale

Values are clamped before the cast, because devices cast larger ones differently (to NaN, or 448). Input is also checked
to be finite. Layouts follow Hugging Face checkpoints, which call a block scale `weight_scale_inv`, although values are
multiplied by it.

Two smaller formats are emulated in float32, which holds their values exactly (no torch dtype holds e3m2, and none for
e2m1 supports casts). Neither has infinities or NaN; values that are too large saturate.

    e3m2   0, ±.0625 … ±28    2 mantissa bits, steps of 2^-4 below 2^-2    (OCP Microscaling Formats 1.0, table 5)
    e2m1   0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives                   (the same, table 4)

    one scale        amax / largest, for a matrix, or for a token of the activations
    NVFP4            s = amax / (6 · 448) in float32, for a matrix or a token; s₁₆ = e4m3(amax₁₆ / (6 s)) for 16 values;
                     w' = e2m1(w / (s₁₆ s)) · (s₁₆ s): the scales of ModelOpt's NVFP4QTensor, bit for bit
    MXFP4            2^⌈log2(amax₃₂ / 6)⌉ for 32 values: nothing saturates, as in ModelOpt and in our MXFP8

Engines calibrate the float32 scale of NVFP4's activations beforehand. Here each token has its own scale, so that its
rounding depends neither on a calibration nor on other tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from precision.formats.rollout_format import BLOCK, NV_GROUP, RolloutFormat

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SCALE_FLOOR = 1e-12
"""Keeps tensors of zeros from dividing by zero."""
SMALLEST_E4M3 = 2.0**-9
"""The smallest positive value. A scale of zero would turn the scaled values to zeros or NaN."""
_EXPONENT = 0x7F800000
"""The exponent bits of a float32."""


def to_e4m3(values: Tensor) -> Tensor:
    """Round to the nearest e4m3 value (ties to even), saturating at ±448. The input must be finite."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def scale_of(amax: Tensor, largest: float = E4M3_MAX) -> Tensor:
    """Return the float32 scale(s) that map the largest magnitude(s) `amax` to `largest`, the format's largest value.
    Raises FloatingPointError when an `amax` is not finite."""
    amax = amax.float()
    require_finite(amax)
    # Divide by a tensor: CUDA divides by a number through its reciprocal, a bit off a CPU's result.
    return (amax / torch.full_like(amax, largest)).clamp(min=SCALE_FLOOR)


def require_finite(amax: Tensor) -> None:
    """Raise FloatingPointError unless all largest magnitudes are finite. Synchronizes with a GPU."""
    if not math.isfinite(peak := float(amax.max())):  # one kernel and one copy; NaN is larger than all
        raise FloatingPointError(
            f"largest magnitude to quantize is {peak}, expected finite values; a cast would hide it as "
            "its largest value or NaN; look for the overflow before this layer"
        )


def quantize_block(weight: Tensor, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor]:
    """Quantize `weight` [N, K] with one scale per block: return (q e4m3 [N, K], scale_inv f32 [ceil(N / rows), ceil(K /
    columns)]). Blocks at the lower and right edge may be smaller. Raises FloatingPointError on non-finite input,
    ValueError unless `weight` is a matrix with elements."""
    require_matrix(weight)
    rows, columns = block
    height, width = weight.shape
    values = weight.detach().float()
    padded = F.pad(values, (0, -width % columns, 0, -height % rows))
    tiles = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    scale_inv = scale_of(tiles.abs().amax(dim=(1, 3)))
    return to_e4m3(values / _spread(scale_inv, (height, width), block)), scale_inv


def dequantize_block(quantized: Tensor, scale_inv: Tensor, block: tuple[int, int] = BLOCK) -> Tensor:
    """Return the float32 values [N, K] of `quantize_block`'s result. Raises ValueError when the scales do not fit."""
    require_matrix(quantized)
    height, width = quantized.shape
    expected = (-(-height // block[0]), -(-width // block[1]))
    if tuple(scale_inv.shape) != expected:
        raise ValueError(
            f"scales are {tuple(scale_inv.shape)}, a {height}x{width} matrix in {block[0]}x{block[1]} blocks has "
            f"{expected}; pass the scales of the same tensor"
        )
    return quantized.float() * _spread(scale_inv, (height, width), block)


def _spread(scales: Tensor, shape: tuple[int, int], block: tuple[int, int]) -> Tensor:
    rows = scales.repeat_interleave(block[0], dim=0)[: shape[0]]
    return rows.repeat_interleave(block[1], dim=1)[:, : shape[1]]


def require_matrix(weight: Tensor) -> None:
    if not weight.numel():
        raise ValueError(f"weight of shape {tuple(weight.shape)} is empty, expected elements; check the shard")
    if weight.dim() != 2:
        raise ValueError(
            f"block scales need a matrix [out, in], got shape {tuple(weight.shape)}; split stacked experts"
        )


@dataclass(frozen=True)
class SmallFloat:
    """A format without infinities and NaN."""

    mantissa_bits: int
    smallest_exponent: int
    """Smallest exponent of a normal value."""
    largest: float

    def rounded(self, values: Tensor) -> Tensor:
        """Round finite values to the format's nearest, as float32, ties to even, saturating; zeros keep their sign."""
        clamped = values.float().clamp(-self.largest, self.largest)
        binade = (clamped.view(torch.int32) & _EXPONENT).view(torch.float32)  # 2^⌊log2 |x|⌋
        step = binade.clamp(min=2.0**self.smallest_exponent) * 2.0**-self.mantissa_bits
        return torch.round(clamped / step) * step


E3M2 = SmallFloat(mantissa_bits=2, smallest_exponent=-2, largest=28.0)
E2M1 = SmallFloat(mantissa_bits=1, smallest_exponent=0, largest=6.0)
_SMALL = {
    RolloutFormat.EMULATED_FP6: E3M2,
    RolloutFormat.EMULATED_FP4: E2M1,
    RolloutFormat.EMULATED_NVFP4: E2M1,
    RolloutFormat.EMULATED_MXFP4: E2M1,
}
"""Format → its values, where those are not e4m3."""


def fake_quantize(
    values: Tensor, rollout_format: RolloutFormat, *, per_token: bool = False, amax: Tensor | None = None
) -> Tensor:
    """Quantize and dequantize, in the dtype of `values`; gradients pass straight through. `values` are a weight [out,
    in] or, with `per_token`, activations [..., channels], each token rounded alone. `amax` (scalar) raises the largest
    magnitude of a weight that shares its single scale with others. Raises FloatingPointError on non-finite input,
    ValueError for a weight without elements."""
    if not values.numel():
        if per_token:
            return values
        require_matrix(values)
    if rollout_format is RolloutFormat.FP8_BLOCK and not per_token:
        return straight_through(values, dequantize_block(*quantize_block(values)))
    channels, small = values.shape[-1], _SMALL.get(rollout_format)
    largest = E4M3_MAX if small is None else small.largest
    is_nvfp4 = rollout_format is RolloutFormat.EMULATED_NVFP4
    size = NV_GROUP if is_nvfp4 else rollout_format.activation_group or channels
    padded = F.pad(values.detach().float(), (0, -channels % size))
    groups = padded.reshape(*padded.shape[:-1], padded.shape[-1] // size, size)
    peaks = groups.abs().amax(dim=-1, keepdim=True)
    if rollout_format in (RolloutFormat.MXFP8, RolloutFormat.EMULATED_MXFP4):
        # Powers of two, rounded up, so that nothing saturates, as in engines and Transformer Engine (arXiv 2506.08027,
        # section 3); the OCP specification rounds down. At least 2^-126: a smaller scale is no normal float32, and some
        # devices flush it to zero.
        require_finite(peaks)
        mantissa, exponent = torch.frexp(peaks / torch.full_like(peaks, largest))  # mantissa in [0.5, 1)
        rounded_up = torch.where(mantissa > 0.5, exponent, exponent - 1)
        exponent = torch.where(peaks > 0, rounded_up, -126).clamp(-126, 127).int()
        scale = ((exponent + 127) << 23).view(torch.float32)  # by its bits: exact on every device
    else:
        by_group = rollout_format is RolloutFormat.FP8_BLOCK
        by_row = per_token or rollout_format is RolloutFormat.FP8_CHANNEL
        peak = peaks if by_group else peaks.amax(dim=-2, keepdim=True) if by_row else peaks.amax()
        if amax is not None:
            peak = torch.maximum(peak, amax.float())
        scale = scale_of(peak, largest * E4M3_MAX if is_nvfp4 else largest)
        if is_nvfp4:
            ratio = peaks / (largest * scale)
            scale = torch.where(ratio == 0, 1.0, ratio).clamp(SMALLEST_E4M3, E4M3_MAX).to(E4M3).float() * scale
    rounded = to_e4m3(groups / scale).float() if small is None else small.rounded(groups / scale)
    return straight_through(values, (rounded * scale).flatten(-2)[..., :channels])


def straight_through(original: Tensor, quantized: Tensor) -> Tensor:
    """Return exactly `quantized`, in `original`'s dtype, with the identity as derivative in `original`. (`original +
    (quantized - original).detach()` would round twice.)"""
    result: Tensor = _StraightThrough.apply(original, quantized)  # type: ignore[no-untyped-call]
    return result


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, original: Tensor, quantized: Tensor) -> Tensor:  # noqa: ARG004
        return quantized.to(original.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:  # noqa: ARG004
        return gradients[0], None
