"""Quantize weights and activations; the engine's emulation and the learner's use the same functions.

e4m3 ("fn": no infinities, largest value 448, 3 mantissa bits) has a half-ulp of at most 2^-4 of the value down to
2^-6, and steps of 2^-9 below. A scale maps the largest magnitude of a tensor, block or group to 448:

    scale = max(amax / 448, 1e-12),   q = e4m3(clamp(w / scale, -448, 448)),   w' = q * scale

Values are clamped before the cast, because devices differ in what the cast alone makes of larger ones (NaN, or 448).
Input is checked to be finite besides. Layouts are those of Hugging Face checkpoints: a block scale is called
`weight_scale_inv` there, although values are multiplied by it.

Two smaller formats are emulated in float32, which holds their values exactly (no torch dtype holds e3m2, and none of
e2m1 can be cast to). Neither has infinities or NaN; values that are too large saturate.

    e3m2   0, ±.0625 … ±28    2 mantissa bits, steps of 2^-4 below 2^-2    (OCP Microscaling Formats 1.0, table 5)
    e2m1   0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives                   (the same, table 4)

    one scale        amax / largest, for a matrix, or for a token of the activations
    NVFP4            s = amax / (6 · 448) in float32, for a matrix or a token; s₁₆ = e4m3(amax₁₆ / (6 s)) for 16 values;
                     w' = e2m1(w / (s₁₆ s)) · (s₁₆ s): the scales of ModelOpt's NVFP4QTensor, bit for bit
    MXFP4            2^⌈log2(amax₃₂ / 6)⌉ for 32 values: nothing saturates, as ModelOpt has it and as our MXFP8

Engines calibrate the float32 scale of NVFP4's activations beforehand. Here each token has its own, so that the rounding
of a token depends neither on a calibration nor on the tokens beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from precision.formats.rollout_format import ACTIVATION_GROUP, BLOCK, MX_GROUP, NV_GROUP, RolloutFormat

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E8M0 = torch.float8_e8m0fnu
"""A power of two: the 8 exponent bits of a float32."""
SCALE_FLOOR = 1e-12
"""Keeps tensors of zeros from dividing by zero."""
SMALLEST_E4M3 = 2.0**-9
"""The smallest positive value: a scale of zero would make zeros, or NaN, of what it scales."""
_EXPONENT = 0x7F800000
"""The exponent bits of a float32."""
Rounding = Callable[[Tensor], Tensor]


def to_e4m3(values: Tensor) -> Tensor:
    """Round to the nearest e4m3 value (ties to even), saturating at +-448. Finite input is the caller's duty."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def scale_of(amax: Tensor, largest: float = E4M3_MAX) -> Tensor:
    """float32 scale(s) that map the largest magnitude(s) `amax` to `largest`, the largest value of the format. Raises
    FloatingPointError when one is not finite."""
    amax = amax.float()
    require_finite(amax)
    # By a tensor: CUDA divides by a number by multiplying with its reciprocal, a bit off what a CPU makes of it.
    return (amax / torch.full_like(amax, largest)).clamp(min=SCALE_FLOOR)


def require_finite(amax: Tensor) -> None:
    """Raises FloatingPointError unless all largest magnitudes are finite. On a GPU, waits for them."""
    if not bool(amax.isfinite().all()):
        raise FloatingPointError(
            f"largest magnitude to quantize is {float(amax.max())}, expected finite values; a cast would hide it as "
            "its largest value or NaN; look for the overflow before this layer"
        )


def quantize_tensor(weight: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One scale for all: (q e4m3 of `weight`'s shape, scale f32 scalar).

    `amax` (scalar) overrides the largest magnitude, for a matrix that shares its scale with others. Raises
    FloatingPointError on non-finite input, ValueError for an empty tensor.
    """
    require_values(weight)
    own = weight.detach().abs().amax()
    scale = scale_of(own if amax is None else torch.maximum(own, amax))
    return to_e4m3(weight.detach().float() / scale), scale


def dequantize_tensor(quantized: Tensor, scale: Tensor) -> Tensor:
    """float32 values of `quantize_tensor`'s result."""
    return quantized.float() * scale


def quantize_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    """One scale a row: (q e4m3 [N, K], scale f32 [N]) of `weight` [N, K]. Raises as `quantize_block`."""
    require_values(weight)
    require_matrix(weight)
    values = weight.detach().float()
    scale = scale_of(values.abs().amax(dim=1))
    return to_e4m3(values / scale[:, None]), scale


def dequantize_channel(quantized: Tensor, scale: Tensor) -> Tensor:
    """float32 values [N, K] of `quantize_channel`'s result."""
    return quantized.float() * scale[:, None]


def quantize_block(weight: Tensor, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor]:
    """One scale a block: (q e4m3 [N, K], scale_inv f32 [ceil(N / rows), ceil(K / columns)]) of `weight` [N, K].

    Blocks at the lower and right edge may be smaller. Raises FloatingPointError on non-finite input, ValueError
    unless `weight` is a matrix with elements.
    """
    require_values(weight)
    require_matrix(weight)
    rows, columns = block
    height, width = weight.shape
    values = weight.detach().float()
    padded = F.pad(values, (0, -width % columns, 0, -height % rows))
    tiles = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    scale_inv = scale_of(tiles.abs().amax(dim=(1, 3)))
    return to_e4m3(values / _spread(scale_inv, (height, width), block)), scale_inv


def dequantize_block(quantized: Tensor, scale_inv: Tensor, block: tuple[int, int] = BLOCK) -> Tensor:
    """float32 values [N, K] of `quantize_block`'s result. Raises ValueError when the scales do not fit the matrix."""
    require_matrix(quantized)
    height, width = quantized.shape
    expected = (-(-height // block[0]), -(-width // block[1]))
    if tuple(scale_inv.shape) != expected:
        raise ValueError(
            f"scales are {tuple(scale_inv.shape)}, a {height}x{width} matrix in {block[0]}x{block[1]} blocks has "
            f"{expected}; pass the scales of the same tensor"
        )
    return quantized.float() * _spread(scale_inv, (height, width), block)


def fake_quantize_tensor(weight: Tensor, amax: Tensor | None = None) -> Tensor:
    """Quantize per tensor and back, in `weight`'s dtype; gradients pass straight through."""
    return straight_through(weight, dequantize_tensor(*quantize_tensor(weight, amax)))


def fake_quantize_channel(weight: Tensor) -> Tensor:
    """Quantize per row and back, in `weight`'s dtype; gradients pass straight through."""
    return straight_through(weight, dequantize_channel(*quantize_channel(weight)))


def fake_quantize_block(weight: Tensor, block: tuple[int, int] = BLOCK) -> Tensor:
    """Quantize per block and back, in `weight`'s dtype; gradients pass straight through."""
    return straight_through(weight, dequantize_block(*quantize_block(weight, block), block))


def fake_quantize_activation(activation: Tensor, group: int | None = None) -> Tensor:
    """Quantize [..., channels] dynamically and back, in its dtype; gradients pass straight through.

    One scale a token (`group` None) or a token and `group` adjacent channels, the last group holding what is left.
    Raises FloatingPointError on non-finite input, ValueError for a group below 1.
    """
    if group is not None and group < 1:
        raise ValueError(f"activation group is {group}, expected at least 1 channel or None for a whole token")
    channels = activation.shape[-1]
    if not activation.numel():
        return activation
    groups = groups_of(activation, channels if group is None else group)
    scale = scale_of(groups.abs().amax(dim=-1, keepdim=True))
    restored = (to_e4m3(groups / scale).float() * scale).flatten(-2)[..., :channels]
    return straight_through(activation, restored)


def quantize_mxfp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """One scale 2^e for each 32 values of the last dimension: (q e4m3 [..., K], scale e8m0 [..., ceil(K / 32)]).

    e is log2(amax / 448) rounded up, as engines and Transformer Engine have it (arXiv 2506.08027, section 3): nothing
    saturates, where the OCP specification's rounding down cuts values above 448 off. Raises FloatingPointError on
    non-finite input, ValueError for an empty tensor.
    """
    require_values(values)
    groups, columns = groups_of(values, MX_GROUP), values.shape[-1]
    scale = mx_scale(groups.abs().amax(dim=-1, keepdim=True), E4M3_MAX)
    quantized = to_e4m3(groups / scale).flatten(-2)[..., :columns]
    return quantized, scale.squeeze(-1).to(E8M0)


def dequantize_mxfp8(quantized: Tensor, scale: Tensor) -> Tensor:
    """float32 values [..., K] of `quantize_mxfp8`'s result."""
    return quantized.float() * scale.float().repeat_interleave(MX_GROUP, dim=-1)[..., : quantized.shape[-1]]


def fake_quantize_mxfp8(values: Tensor) -> Tensor:
    """Quantize [..., K] in groups of 32 and back, in its dtype; gradients pass straight through."""
    return straight_through(values, dequantize_mxfp8(*quantize_mxfp8(values))) if values.numel() else values


def groups_of(values: Tensor, size: int) -> Tensor:
    """float32 [..., ceil(K / size), size] of `values` [..., K]; what is missing in the last group is zero."""
    padded = F.pad(values.detach().float(), (0, -values.shape[-1] % size))
    return padded.reshape(*padded.shape[:-1], padded.shape[-1] // size, size)


def mx_scale(amax: Tensor, largest: float) -> Tensor:
    """float32 powers of two: amax / `largest`, the largest value of the format, rounded up. At least 2^-126: a smaller
    scale is no normal float32, and some devices make zero of it. Raises FloatingPointError as `scale_of`."""
    require_finite(amax)
    mantissa, exponent = torch.frexp(amax / torch.full_like(amax, largest))  # mantissa in [0.5, 1)
    rounded_up = torch.where(mantissa > 0.5, exponent, exponent - 1)
    exponent = torch.where(amax > 0, rounded_up, -126).clamp(-126, 127).int()
    return ((exponent + 127) << 23).view(torch.float32)  # by its bits: exact on every device


def straight_through(original: Tensor, quantized: Tensor) -> Tensor:
    """Exactly `quantized`, in `original`'s dtype, with the identity as derivative in `original`.

    (`original + (quantized - original).detach()` would round twice.)
    """
    result: Tensor = _StraightThrough.apply(original, quantized)  # type: ignore[no-untyped-call]
    return result


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, original: Tensor, quantized: Tensor) -> Tensor:  # noqa: ARG004
        return quantized.to(original.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:  # noqa: ARG004
        return gradients[0], None


def _spread(scales: Tensor, shape: tuple[int, int], block: tuple[int, int]) -> Tensor:
    rows = scales.repeat_interleave(block[0], dim=0)[: shape[0]]
    return rows.repeat_interleave(block[1], dim=1)[:, : shape[1]]


def require_values(weight: Tensor) -> None:
    """Raises ValueError for an empty tensor."""
    if not weight.numel():
        raise ValueError(f"weight of shape {tuple(weight.shape)} is empty, expected elements; check the shard")


def require_matrix(weight: Tensor) -> None:
    """Raises ValueError for anything but a matrix."""
    if weight.dim() != 2:
        raise ValueError(
            f"block scales need a matrix [out, in], got shape {tuple(weight.shape)}; split stacked experts"
        )


@dataclass(frozen=True)
class SmallFloat:
    """A format without infinities and NaN."""

    mantissa_bits: int
    smallest_exponent: int
    """Of a normal value."""
    largest: float

    def rounded(self, values: Tensor) -> Tensor:
        """float32, the nearest values of the format, ties to even, saturating; the sign of a zero stays. Finite input
        is the caller's duty."""
        clamped = values.float().clamp(-self.largest, self.largest)
        binade = (clamped.view(torch.int32) & _EXPONENT).view(torch.float32)  # 2^⌊log2 |x|⌋
        step = binade.clamp(min=2.0**self.smallest_exponent) * 2.0**-self.mantissa_bits
        return torch.round(clamped / step) * step


E3M2 = SmallFloat(mantissa_bits=2, smallest_exponent=-2, largest=28.0)
E2M1 = SmallFloat(mantissa_bits=1, smallest_exponent=0, largest=6.0)


def fake_quantize_matrix(weight: Tensor, kind: SmallFloat) -> Tensor:
    """Round with one scale for all and back, in `weight`'s dtype; gradients pass straight through.

    Raises FloatingPointError on non-finite input, ValueError for an empty tensor.
    """
    require_values(weight)
    return _scaled(weight, weight.detach().abs().amax(), kind)


def fake_quantize_tokens(activation: Tensor, kind: SmallFloat) -> Tensor:
    """Round [..., channels] with one scale a token and back, in its dtype; gradients pass straight through.

    Raises FloatingPointError on non-finite input.
    """
    if not activation.numel():
        return activation
    return _scaled(activation, activation.detach().abs().amax(dim=-1, keepdim=True), kind)


def fake_quantize_nvfp4_matrix(weight: Tensor) -> Tensor:
    """NVFP4 with one float32 scale for all of `weight` [..., K], and back, in its dtype. Raises as
    `fake_quantize_matrix`."""
    require_values(weight)
    return _nvfp4(weight, weight.detach().abs().amax())


def fake_quantize_nvfp4_tokens(activation: Tensor) -> Tensor:
    """NVFP4 with one float32 scale for each token of [..., channels], and back, in its dtype. Raises as
    `fake_quantize_tokens`."""
    if not activation.numel():
        return activation
    return _nvfp4(activation, activation.detach().abs().amax(dim=-1, keepdim=True))


def fake_quantize_mxfp4(values: Tensor) -> Tensor:
    """Round [..., K] in groups of 32 and back, in its dtype; gradients pass straight through. Raises
    FloatingPointError on non-finite input."""
    if not values.numel():
        return values
    groups = groups_of(values, MX_GROUP)
    scale = mx_scale(groups.abs().amax(dim=-1, keepdim=True), E2M1.largest)
    restored = (E2M1.rounded(groups / scale) * scale).flatten(-2)[..., : values.shape[-1]]
    return straight_through(values, restored)


def _scaled(values: Tensor, amax: Tensor, kind: SmallFloat) -> Tensor:
    scale = scale_of(amax, kind.largest)
    return straight_through(values, kind.rounded(values.detach().float() / scale) * scale)


def _nvfp4(values: Tensor, amax: Tensor) -> Tensor:
    """`amax` [] or [..., 1]: what shares a float32 scale."""
    whole = scale_of(amax, E2M1.largest * E4M3_MAX).reshape(*amax.shape, 1)  # [1], or [..., 1, 1] before groups
    groups = groups_of(values, NV_GROUP)
    largest = groups.abs().amax(dim=-1, keepdim=True)
    require_finite(largest)
    ratio = largest / (E2M1.largest * whole)
    ratio = torch.where(ratio == 0, 1.0, ratio).clamp(SMALLEST_E4M3, E4M3_MAX)
    scale = ratio.to(E4M3).float() * whole
    restored = (E2M1.rounded(groups / scale) * scale).flatten(-2)[..., : values.shape[-1]]
    return straight_through(values, restored)


FAKE_QUANTIZE: Mapping[RolloutFormat, Rounding] = {
    RolloutFormat.FP8_BLOCK: fake_quantize_block,
    RolloutFormat.FP8_CHANNEL: fake_quantize_channel,
    RolloutFormat.MXFP8: fake_quantize_mxfp8,
    RolloutFormat.EMULATED_FP6: partial(fake_quantize_matrix, kind=E3M2),
    RolloutFormat.EMULATED_FP4: partial(fake_quantize_matrix, kind=E2M1),
    RolloutFormat.EMULATED_NVFP4: fake_quantize_nvfp4_matrix,
    RolloutFormat.EMULATED_MXFP4: fake_quantize_mxfp4,
}
"""Of a weight [out, in], for the formats in which each matrix is quantized for itself, stacked or not: all but
fp8_tensor."""

_ACTIVATIONS: Mapping[RolloutFormat, Rounding] = {
    RolloutFormat.FP8_TENSOR: fake_quantize_activation,
    RolloutFormat.FP8_BLOCK: partial(fake_quantize_activation, group=ACTIVATION_GROUP),
    RolloutFormat.FP8_CHANNEL: fake_quantize_activation,
    RolloutFormat.MXFP8: fake_quantize_mxfp8,
    RolloutFormat.EMULATED_FP6: partial(fake_quantize_tokens, kind=E3M2),
    RolloutFormat.EMULATED_FP4: partial(fake_quantize_tokens, kind=E2M1),
    RolloutFormat.EMULATED_NVFP4: fake_quantize_nvfp4_tokens,
    RolloutFormat.EMULATED_MXFP4: fake_quantize_mxfp4,
}


def fake_quantize_activation_as(activation: Tensor, rollout_format: RolloutFormat) -> Tensor:
    """`activation` [..., channels] as the matrix product of an engine with that format sees it, same dtype. Raises
    FloatingPointError on non-finite input."""
    return _ACTIVATIONS[rollout_format](activation)
