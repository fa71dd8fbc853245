"""e3m2 and e2m1, floating formats of 6 and 4 bits, and the scales under which they are emulated.

    e3m2   0, ±.0625 … ±28    2 mantissa bits, steps of 2^-4 below 2^-2    (OCP Microscaling Formats 1.0, table 5)
    e2m1   0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives                   (the same, table 4)

Neither has infinities or NaN: what is too large saturates, and input that is not finite is refused. Rounding is to the
nearest value, ties to the one with the even mantissa. No torch dtype holds e3m2 and none of e2m1 can be cast to, so the
values are made in float32, where they are exact.

    one scale        amax / largest, for a matrix, or for a token of the activations
    NVFP4            s = amax / (6 · 448) in float32, for a matrix or a token; s₁₆ = e4m3(amax₁₆ / (6 s)) for 16 values;
                     w' = e2m1(w / (s₁₆ s)) · (s₁₆ s)
    MXFP4            2^⌈log2(amax₃₂ / 6)⌉ for 32 values: nothing saturates, as ModelOpt has it and as our MXFP8

The scales of NVFP4 are those of ModelOpt's NVFP4QTensor, bit for bit. ModelOpt is no dependency of engines, and its
MXFP4QTensor rounds every tie down; it is what tests compare with. One thing is our own: engines calibrate the float32
scale of NVFP4's activations beforehand, here each token has one, so that what a token is rounded to depends neither on
a calibration nor on the tokens beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precision.formats.formats import (
    E4M3,
    E4M3_MAX,
    groups_of,
    mx_scale,
    require_finite,
    require_values,
    scale_of,
    straight_through,
)
from precision.formats.rollout_format import MX_GROUP, NV_GROUP

_EXPONENT = 0x7F800000
"""The exponent bits of a float32."""
SMALLEST_E4M3 = 2.0**-9
"""The smallest positive value: a scale of zero would make zeros, or NaN, of what it scales."""


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
