"""Casts saturate, and no rounding is worse than its documented bound: by hand, and over random magnitudes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from precision.formats.casts import error_bound, saturating_cast, unit_roundoff
from precision.formats.formats import (
    E4M3,
    dequantize_block,
    dequantize_channel,
    dequantize_mxfp8,
    dequantize_tensor,
    quantize_block,
    quantize_channel,
    quantize_mxfp8,
    quantize_tensor,
)
from tests.support.examples import examples

DTYPES = (torch.float32, torch.float16, torch.bfloat16, E4M3)
IN_FLOAT32 = 2.0**-22
"""Division and product of a scaled format, in float32."""


@pytest.mark.parametrize(
    ("dtype", "largest", "roundoff"),
    [
        (torch.float32, 3.4028234663852886e38, 2.0**-24),
        (torch.float16, 65504.0, 2.0**-11),
        (torch.bfloat16, 3.3895313892515355e38, 2.0**-8),
        (E4M3, 448.0, 2.0**-4),
    ],
)
def test_saturation_and_precision(dtype: torch.dtype, largest: float, roundoff: float) -> None:
    infinite = torch.tensor([float("inf"), -float("inf"), 1e300, -1e300, float("nan")], dtype=torch.float64)
    cast = saturating_cast(infinite, dtype).double()
    assert cast[:4].tolist() == [largest, -largest, largest, -largest]
    assert bool(cast[4].isnan())
    assert unit_roundoff(dtype) == roundoff
    half_way = torch.tensor([1 + roundoff, 1 + 3 * roundoff], dtype=torch.float64)
    assert saturating_cast(half_way, dtype).double().tolist() == [1.0, 1 + 4 * roundoff]  # ties to even


def spread(seed: int, spread_of: float, shape: tuple[int, ...] = (3, 300)) -> Tensor:
    """Values of many magnitudes, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    values = values * torch.exp(spread_of * torch.randn(shape, generator=generator, dtype=torch.float64))
    return torch.where(torch.rand(shape, generator=generator) < 0.05, 0.0, values)


@given(st.integers(0, 10_000), st.floats(0.0, 12.0), st.sampled_from(DTYPES))
@settings(max_examples=examples(60))
def test_casts_keep_their_bound(seed: int, width: float, dtype: torch.dtype) -> None:
    values = spread(seed, width)
    inside = values.abs() <= torch.finfo(dtype).max
    error = (saturating_cast(values, dtype).double() - values).abs()
    assert bool((error <= error_bound(values, dtype))[inside].all())
    assert bool((saturating_cast(values, dtype).double().abs() == torch.finfo(dtype).max)[~inside].all())


def blocks_of(scale_inv: Tensor, shape: torch.Size) -> Tensor:
    return scale_inv.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]


SCALED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "tensor": lambda x: (dequantize_tensor(*quantize_tensor(x)), quantize_tensor(x)[1]),
    "channel": lambda x: (dequantize_channel(*quantize_channel(x)), quantize_channel(x)[1][:, None]),
    "block": lambda x: (dequantize_block(*quantize_block(x)), blocks_of(quantize_block(x)[1], x.shape)),
    "mxfp8": lambda x: (
        dequantize_mxfp8(*quantize_mxfp8(x)),
        quantize_mxfp8(x)[1].float().repeat_interleave(32, 1)[:, : x.shape[1]],
    ),
}


@given(st.integers(0, 10_000), st.floats(0.0, 4.0), st.sampled_from(sorted(SCALED)), st.integers(1, 200))
@settings(max_examples=examples(80))
def test_scaled_formats_keep_their_bound(seed: int, width: float, name: str, columns: int) -> None:
    values = spread(seed, width, (130, columns)).float()
    restored, scale = SCALED[name](values)
    error = (restored.double() - values.double()).abs()
    assert bool((error <= error_bound(values, E4M3, scale) + IN_FLOAT32 * values.double().abs()).all())


def test_a_bound_is_reached() -> None:
    """Half way between two values of e4m3: a bound that nothing reaches would prove nothing."""
    value = torch.tensor([1 + 2.0**-4])
    assert float((saturating_cast(value, E4M3).float() - value).abs()) == 2.0**-4
    assert float(error_bound(value, E4M3)) == pytest.approx(2.0**-4 * (1 + 2.0**-4))
    tiny = torch.tensor([2.0**-10 * 3.0])  # half way between the steps 2^-9 and 2 2^-9 ... of what is subnormal
    assert float((saturating_cast(tiny, E4M3).float() - tiny).abs()) == float(error_bound(tiny, E4M3)) == 2.0**-10
