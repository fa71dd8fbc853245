"""e4m3 quantization per tensor, row and block, the same for the engine's emulation and the learner's.

e4m3 ("fn": no infinities, largest value 448, 3 mantissa bits) has a half-ulp of at most 2^-4 of the value down to
2^-6, and steps of 2^-9 below. A scale maps the largest magnitude of a tensor, block or group to 448:

    scale = max(amax / 448, 1e-12),   q = e4m3(clamp(w / scale, -448, 448)),   w' = q * scale

Values are clamped before the cast, because devices differ in what the cast alone makes of larger ones (NaN, or 448).
Input is checked to be finite besides. Layouts are those of Hugging Face checkpoints: a block scale is called
`weight_scale_inv` there, although values are multiplied by it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from precision.formats.rollout_format import BLOCK, MX_GROUP

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E8M0 = torch.float8_e8m0fnu
"""A power of two: the 8 exponent bits of a float32."""
SCALE_FLOOR = 1e-12
"""Keeps tensors of zeros from dividing by zero."""


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
