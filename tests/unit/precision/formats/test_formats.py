"""e4m3 formats: values by hand, error bounds, idempotence, ragged shapes, zeros, saturation, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from precision.formats.formats import (
    E4M3_MAX,
    SCALE_FLOOR,
    dequantize_block,
    fake_quantize,
    quantize_block,
    to_e4m3,
)
from precision.formats.rollout_format import RolloutFormat
from tests.support.examples import examples

TENSOR, BLOCKS = RolloutFormat.FP8_TENSOR, RolloutFormat.FP8_BLOCK
HALF_ULP = 2.0**-4
"""Largest relative rounding error of a normal e4m3 value: half of the last of 3 mantissa bits."""
HALF_SUBNORMAL = 2.0**-10
"""Largest absolute rounding error below 2^-6, where steps are 2^-9, in units of the scale."""


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def all_e4m3_values() -> list[float]:
    """Every finite non-negative value, from the definition of the format (bias 7, 3 mantissa bits, S.1111.111 NaN)."""
    values = [mantissa * 2.0**-9 for mantissa in range(8)]
    values += [(8 + mantissa) * 2.0 ** (exponent - 10) for exponent in range(1, 16) for mantissa in range(8)]
    return values[:-1]


def test_cast_is_exact_on_the_grid_and_nearest_even_between() -> None:
    grid = torch.tensor(all_e4m3_values())
    assert grid.max() == E4M3_MAX
    assert torch.equal(to_e4m3(grid).float(), grid)
    assert torch.equal(to_e4m3(-grid).float(), -grid)
    between = (grid[:-1] + grid[1:]) / 2  # a tie goes to the neighbor with an even mantissa
    even = torch.where(torch.arange(len(between)) % 2 == 0, grid[:-1], grid[1:])
    assert torch.equal(to_e4m3(between).float(), even)


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
@pytest.mark.parametrize("value", [449.0, 464.0, 465.0, 1e30])
def test_cast_saturates(size: int, value: float) -> None:
    both = torch.cat([torch.full((size,), value), torch.full((size,), -value)])
    assert torch.equal(to_e4m3(both).float(), E4M3_MAX * both.sign())


def test_tensor_by_hand() -> None:
    # amax 896: scale 2; 100 / 2 = 50 lies between 48 and 52 (step 4): tie, even mantissa is 48 (12 * 4) -> 96
    weight = torch.tensor([[896.0, -100.0], [0.0, 26.0]])
    assert fake_quantize(weight, TENSOR).tolist() == [[896.0, -96.0], [0.0, 26.0]]


def test_block_by_hand() -> None:
    # 2 x 2 blocks of a 3 x 3 matrix: amax 448, 4480, 44.8, 0 in the four (ragged) blocks
    weight = torch.tensor([[448.0, 1.0, 4480.0], [2.0, 3.0, 10.0], [44.8, -44.8, 0.0]])
    quantized, scale_inv = quantize_block(weight, (2, 2))
    assert scale_inv.tolist() == [[1.0, 10.0], [pytest.approx(0.1), pytest.approx(SCALE_FLOOR)]]
    assert quantized.float().tolist() == [[448, 1, 448], [2, 3, 1], [448, -448, 0]]
    torch.testing.assert_close(dequantize_block(quantized, scale_inv, (2, 2)), weight)


def test_gaussian_weights_lose_2_65_percent() -> None:
    weight = gaussian(512, 384)
    for restored in (fake_quantize(weight, BLOCKS), fake_quantize(weight, TENSOR)):
        relative = float((restored - weight).norm() / weight.norm())
        assert relative == pytest.approx(0.0265, abs=0.0005)


shapes = st.tuples(st.integers(1, 200), st.integers(1, 200))
magnitudes = st.sampled_from([1e-6, 1e-2, 1.0, 1e4])


def assert_within_half_ulp(restored: Tensor, original: Tensor, scale: Tensor) -> None:
    bound = torch.maximum(HALF_ULP * original.abs(), HALF_SUBNORMAL * scale.expand_as(original))
    assert bool(((restored - original).abs() <= bound * (1 + 1e-5)).all())


@settings(max_examples=examples(40))
@given(shapes, magnitudes, st.integers(0, 100))
def test_block_error_bound_idempotence_and_shape(shape: tuple[int, int], magnitude: float, seed: int) -> None:
    weight = magnitude * gaussian(*shape, seed=seed)
    quantized, scale_inv = quantize_block(weight)
    assert quantized.shape == weight.shape
    assert scale_inv.shape == (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128))
    restored = dequantize_block(quantized, scale_inv)
    for i, j in [(i, j) for i in range(scale_inv.shape[0]) for j in range(scale_inv.shape[1])]:
        tile = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
        assert_within_half_ulp(restored[tile], weight[tile], scale_inv[i, j])
    again, _ = quantize_block(restored)
    assert torch.equal(again.view(torch.uint8), quantized.view(torch.uint8))


@settings(max_examples=examples(40))
@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), magnitudes, st.integers(0, 100))
def test_tensor_error_bound_idempotence_and_shape(shape: list[int], magnitude: float, seed: int) -> None:
    weight = magnitude * gaussian(*shape, seed=seed)
    restored = fake_quantize(weight, TENSOR)
    assert_within_half_ulp(restored, weight, weight.abs().amax() / E4M3_MAX)
    assert torch.equal(fake_quantize(restored, TENSOR), restored)


@settings(max_examples=examples(40))
@given(st.integers(1, 5), st.integers(1, 300), st.sampled_from([TENSOR, BLOCKS]), st.integers(0, 100))
def test_activation_equals_each_group_quantized_alone(
    tokens: int, channels: int, name: RolloutFormat, seed: int
) -> None:
    activation = gaussian(tokens, channels, seed=seed) * torch.logspace(-3, 3, tokens)[:, None]
    restored = fake_quantize(activation, name, per_token=True)
    size = name.activation_group or channels
    for token in range(tokens):
        for start in range(0, channels, size):
            alone = fake_quantize(activation[token, start : start + size], TENSOR)
            assert torch.equal(restored[token, start : start + size], alone)


def test_activation_keeps_shape_dtype_and_empties() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        activation = gaussian(2, 3, 130).to(dtype)
        restored = fake_quantize(activation, BLOCKS, per_token=True)
        assert (restored.shape, restored.dtype) == (activation.shape, dtype)
    assert fake_quantize(torch.zeros(0, 8), BLOCKS, per_token=True).shape == (0, 8)


def test_zeros_stay_zeros() -> None:
    zeros = torch.zeros(130, 5)
    for name in RolloutFormat:
        for per_token in (False, True):
            assert torch.equal(fake_quantize(zeros, name, per_token=per_token), zeros)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_input_raises(bad: float) -> None:
    weight = torch.ones(3, 3)
    weight[1, 2] = bad
    for name in RolloutFormat:
        for per_token in (False, True):
            with pytest.raises(FloatingPointError, match=r"largest magnitude to quantize is .* expected finite"):
                fake_quantize(weight, name, per_token=per_token)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="need a matrix"):
        quantize_block(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="is empty"):
        fake_quantize(torch.zeros(0, 4), TENSOR)
    quantized, _ = quantize_block(torch.ones(130, 4))
    with pytest.raises(ValueError, match="pass the scales of the same tensor"):
        dequantize_block(quantized, torch.ones(1, 1))


def test_gradients_pass_straight_through_and_input_is_untouched() -> None:
    weight = gaussian(5, 7).requires_grad_()
    before = weight.detach().clone()
    upstream = gaussian(5, 7, seed=1)
    for name in RolloutFormat:
        for per_token in (False, True):
            weight.grad = None
            fake_quantize(weight, name, per_token=per_token).backward(upstream)  # type: ignore[no-untyped-call]
            assert weight.grad is not None
            assert torch.equal(weight.grad, upstream)
    assert torch.equal(weight, before)


def test_shared_amax_is_the_scale_of_the_stacked_matrix() -> None:
    small, large = gaussian(4, 6), 100 * gaussian(2, 6, seed=1)
    stacked = fake_quantize(torch.cat([small, large]), TENSOR)
    amax = torch.cat([small, large]).abs().amax()
    parts = [fake_quantize(part, TENSOR, amax=amax) for part in (small, large)]
    assert torch.equal(torch.cat(parts), stacked)


def test_channel_scales_are_the_rows() -> None:
    weight = torch.tensor([[448.0, 17.0], [0.448, 0.017], [0.0, 0.0]])
    restored = fake_quantize(weight, RolloutFormat.FP8_CHANNEL)
    torch.testing.assert_close(restored, torch.tensor([[448.0, 16.0], [0.448, 0.016], [0.0, 0.0]]))


def test_mx_scales_are_powers_of_two_that_keep_all_values_below_the_largest() -> None:
    """32 values a scale: 448 has scale 1, 449 has scale 2, and the last group may be short."""
    row = torch.cat([torch.full((32,), 448.0), torch.full((32,), 449.0), torch.full((3,), 2.0**-20)])
    restored = fake_quantize(row[None], RolloutFormat.MXFP8)[0]
    assert restored[[0, 32, 64]].tolist() == [448.0, 448.0, 2.0**-20]  # with scale 1, 450 of 449


@pytest.mark.parametrize("exponent", [-120, -7, 0, 7, 100])
def test_mx_restores_e4m3_values_of_any_magnitude(exponent: int) -> None:
    values = torch.tensor(all_e4m3_values()) * 2.0**exponent
    groups = torch.cat([values, torch.full((-len(values) % 32,), 448.0 * 2.0**exponent)]).reshape(-1, 32)
    groups[:, 0] = 448.0 * 2.0**exponent  # fixes the scale of each group
    assert torch.equal(fake_quantize(groups, RolloutFormat.MXFP8), groups)


def test_every_format_rounds_activations_its_own_way() -> None:
    activation = gaussian(5, 256) * torch.linspace(0.01, 10, 256)
    rounded = {name: fake_quantize(activation, name, per_token=True) for name in RolloutFormat}
    assert torch.equal(rounded[RolloutFormat.FP8_CHANNEL], rounded[TENSOR])
    assert torch.equal(rounded[RolloutFormat.MXFP8], fake_quantize(activation, RolloutFormat.MXFP8))
    for name in RolloutFormat:
        same = [other for other in RolloutFormat if torch.equal(rounded[name], rounded[other])]
        assert same == ([TENSOR, RolloutFormat.FP8_CHANNEL] if name in (TENSOR, RolloutFormat.FP8_CHANNEL) else [name])
