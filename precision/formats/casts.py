"""Casts between floating formats that saturate, and how large the error of a rounding can be.

torch's own cast to e4m3 makes NaN of what is too large on a CPU, that to float16 makes infinity. Here the largest
finite value comes out, as engines' kernels do it (`satfinite`).

A format with p bits of precision, the leading one included, rounds x to within |x| 2^-p, and below its smallest normal
value to within half of its smallest step: |cast(x) - x| <= max(|x| 2^-p, smallest normal 2^-p) where x does not
saturate (Higham, Accuracy and Stability of Numerical Algorithms, theorem 2.2). A scale s multiplies the second term.

    float32   p = 24    float16   p = 11    bfloat16   p = 8    e4m3   p = 4
"""

from __future__ import annotations

import torch
from torch import Tensor


def saturating_cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` in the floating format `dtype`, rounded to the nearest (ties to even). Infinities become the largest
    finite values, NaN stays NaN."""
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)


def unit_roundoff(dtype: torch.dtype) -> float:
    """2^-p: largest relative error of rounding a normal value. bfloat16: 2^-8 (its eps is 2^-7)."""
    return torch.finfo(dtype).eps / 2


def error_bound(values: Tensor, dtype: torch.dtype, scale: Tensor | float = 1.0) -> Tensor:
    """float64, of `values`' shape: largest |scale * cast(value / scale) - value|, for values that do not saturate.

    `scale` is positive, broadcasts, and is 1 for a cast without one. The rounding of the division and of the product,
    in float32, comes on top: 2^-23 of the value.
    """
    u = unit_roundoff(dtype)
    smallest = torch.as_tensor(scale, dtype=torch.float64) * torch.finfo(dtype).smallest_normal
    return u * torch.maximum(values.double().abs(), smallest.expand_as(values))
