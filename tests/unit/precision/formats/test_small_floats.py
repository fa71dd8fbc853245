"""e3m2, e2m1, and the scales of FP6, FP4, NVFP4 and MXFP4, against enumeration, exact fractions and ModelOpt."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from precision.formats.formats import E2M1, E3M2, SCALE_FLOOR, SmallFloat, fake_quantize
from precision.formats.rollout_format import RolloutFormat
from tests.support.examples import examples

FP4, NVFP4, MXFP4 = RolloutFormat.EMULATED_FP4, RolloutFormat.EMULATED_NVFP4, RolloutFormat.EMULATED_MXFP4
EMULATED = [name for name in RolloutFormat if name.is_emulated]


def enumerated(exponent_bits: int, mantissa_bits: int) -> list[Fraction]:
    """Every non-negative value of a format without infinities and NaN, in the order of its codes."""
    bias = 2 ** (exponent_bits - 1) - 1
    steps = 2**mantissa_bits
    found = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, steps)
        normal = exponent > 0
        found.append(Fraction(mantissa + steps * normal, steps) * Fraction(2) ** (max(exponent, 1) - bias))
    return found


VALUES = {E3M2: enumerated(3, 2), E2M1: enumerated(2, 1)}
kinds = pytest.mark.parametrize("kind", [E3M2, E2M1])


def nearest(value: Fraction, kind: SmallFloat) -> Fraction:
    """By comparison with every value; of two that are as near the one whose code, and so whose mantissa, is even."""
    values = VALUES[kind]
    code = min(range(len(values)), key=lambda code: (abs(values[code] - abs(value)), code % 2))
    return values[code] if value >= 0 else -values[code]


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_values_are_those_of_the_standard() -> None:
    assert [float(value) for value in VALUES[E2M1]] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert [float(value) for value in VALUES[E3M2][:8]] == [0, 0.0625, 0.125, 0.1875, 0.25, 0.3125, 0.375, 0.4375]
    assert [float(value) for value in VALUES[E3M2][-4:]] == [16, 20, 24, 28]
    assert [kind.largest for kind in VALUES] == [float(values[-1]) for values in VALUES.values()]


@kinds
def test_values_stay_ties_go_to_the_even_one_and_signs_stay(kind: SmallFloat) -> None:
    grid = torch.tensor([float(value) for value in VALUES[kind]])
    between = (grid[:-1] + grid[1:]) / 2
    even = torch.where(torch.arange(len(between)) % 2 == 0, grid[:-1], grid[1:])
    for sign in (1, -1):
        assert torch.equal(kind.rounded(sign * grid), sign * grid)
        assert torch.equal(kind.rounded(sign * between), sign * even)
        for beside, expected in ((torch.inf, grid[1:]), (-torch.inf, grid[:-1])):  # a bit above, a bit below a tie
            moved = torch.nextafter(between, torch.tensor(beside))
            assert torch.equal(kind.rounded(sign * moved), sign * expected)
        zeros = kind.rounded(torch.tensor([0.0, 1e-30]) * sign)
        assert zeros.tolist() == [0, 0]
        assert zeros.signbit().tolist() == [sign < 0] * 2


@kinds
def test_what_is_too_large_saturates(kind: SmallFloat) -> None:
    for value in (kind.largest * 1.01, kind.largest * 2, 3e38):
        assert kind.rounded(torch.tensor([value, -value])).tolist() == [kind.largest, -kind.largest]


@settings(max_examples=examples(100))
@given(st.sampled_from([E3M2, E2M1]), st.lists(st.floats(-64, 64, width=32), min_size=1, max_size=30))
def test_rounding_is_to_the_nearest_in_exact_arithmetic(kind: SmallFloat, values: list[float]) -> None:
    found = kind.rounded(torch.tensor(values))
    assert found.tolist() == [float(nearest(Fraction(value), kind)) for value in values]


def test_one_scale_for_a_matrix_and_one_a_token() -> None:
    weight = torch.tensor([[12.0, 5.0], [-0.9, 0.4]])  # amax 12: scale 2, so 5 → 2.5 → 2 (even), .9 → .45 → .5
    assert fake_quantize(weight, FP4).tolist() == [[12.0, 4.0], [-1.0, 0.0]]
    tokens = torch.tensor([[12.0, 5.0], [-0.9, 0.4]])  # the second token has a scale of .15: .4 → 2.67 → 3
    rounded = fake_quantize(tokens, FP4, per_token=True)
    torch.testing.assert_close(rounded, torch.tensor([[12.0, 4.0], [-0.9, 0.45]]))
    assert torch.equal(rounded[1:], fake_quantize(tokens[1:], FP4))


def modelopt_nvfp4(weight: Tensor) -> Tensor:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    stored, scale, whole = NVFP4QTensor.quantize(weight.clone(), 16)
    found: Tensor = stored.dequantize(scale=scale, double_scale=whole, block_sizes={-1: 16}, dtype=torch.float32)
    return found


def modelopt_mxfp4(weight: Tensor) -> Tensor:
    from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor

    stored, scale = MXFP4QTensor.quantize(weight.clone(), 32)
    found: Tensor = stored.dequantize(scale=scale, block_sizes={-1: 32}, dtype=torch.float32)
    return found


@pytest.mark.slow  # importing ModelOpt takes seconds
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("ours", "theirs"), [(NVFP4, modelopt_nvfp4), (MXFP4, modelopt_mxfp4)])
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_block_formats_are_modelopts(ours: RolloutFormat, theirs: Callable[[Tensor], Tensor], spread: float) -> None:
    pytest.importorskip("modelopt")
    weight = 0.02 * gaussian(48, 96) * torch.logspace(-spread, spread, 96)[torch.randperm(96)]
    weight[3, 32:64] = 0.0
    assert torch.equal(fake_quantize(weight, ours), theirs(weight))


def test_a_tie_of_mxfp4_goes_to_the_even_value() -> None:
    """Where ModelOpt's takes the lower one."""
    row = torch.zeros(1, 32)
    row[0, :4] = torch.tensor([6.0, 0.75, 1.75, 3.5])
    assert fake_quantize(row, MXFP4)[0, :4].tolist() == [6.0, 1.0, 2.0, 4.0]


def test_scales_of_nvfp4_by_hand() -> None:
    weight = torch.zeros(1, 48)
    weight[0, 0] = 2688.0  # 6 · 448: the float32 scale is 1, that of the first 16 is 448
    weight[0, 16:18] = torch.tensor([6.0, 2.6])  # scale 1: 2.6 → 3
    weight[0, 32] = 0.01  # .01 / 6 is below the smallest e4m3 scale 2^-9, which makes 5.12 of it: 6
    found = fake_quantize(weight, NVFP4)
    assert found[0, [0, 16, 17, 32]].tolist() == [2688.0, 6.0, 3.0, 6 * 2.0**-9]


def test_a_token_is_rounded_alone_and_a_short_last_group_as_if_zeros_followed() -> None:
    tokens = gaussian(5, 40) * torch.logspace(-3, 3, 5)[:, None]
    whole = torch.nn.functional.pad(tokens, (0, 24))
    for name in EMULATED:
        rounded = fake_quantize(tokens, name, per_token=True)
        for token in range(5):
            assert torch.equal(rounded[token], fake_quantize(tokens[token], name, per_token=True))
        assert torch.equal(rounded, fake_quantize(whole, name, per_token=True)[:, :40])
    assert torch.equal(fake_quantize(tokens[2:3], NVFP4, per_token=True), fake_quantize(tokens[2:3], NVFP4))


@pytest.mark.parametrize("name", list(RolloutFormat))
def test_shares_of_channels_may_be_rounded_alone_exactly_where_the_format_says_so(name: RolloutFormat) -> None:
    """Ranks that share the channels of a token do so, or gather them."""
    activation = gaussian(3, 512) * torch.logspace(-2, 2, 512)
    shares = [fake_quantize(share, name, per_token=True) for share in activation.chunk(4, dim=1)]
    alone = torch.equal(torch.cat(shares, dim=1), fake_quantize(activation, name, per_token=True))
    assert alone == (name.activation_group is not None)


@pytest.mark.parametrize("name", EMULATED)
def test_finite_values_of_any_size_stay_finite_and_others_are_refused(name: RolloutFormat) -> None:
    for rounding in (partial(fake_quantize, rollout_format=name, per_token=per_token) for per_token in (False, True)):
        for size in (0.0, 1e-45, 1e-38, SCALE_FLOOR, 1e20, 1e38):
            assert bool(rounding(torch.full((2, 33), size)).isfinite().all())
        for wrong in (torch.inf, -torch.inf, torch.nan):
            with pytest.raises(FloatingPointError, match="largest magnitude to quantize"):
                rounding(torch.tensor([[1.0, wrong]]))
        assert rounding(gaussian(4, 48).bfloat16()).dtype is torch.bfloat16
    assert fake_quantize(torch.zeros(0, 8), name, per_token=True).shape == (0, 8)


def test_fewer_bits_lose_more() -> None:
    weight = gaussian(256, 256)
    lost = {name: float((fake_quantize(weight, name) - weight).norm() / weight.norm()) for name in RolloutFormat}
    order = [RolloutFormat.FP8_BLOCK, RolloutFormat.EMULATED_FP6, RolloutFormat.EMULATED_NVFP4]
    assert lost[order[0]] < lost[order[1]] < lost[order[2]] < lost[RolloutFormat.EMULATED_MXFP4]
    assert lost[RolloutFormat.EMULATED_NVFP4] < lost[RolloutFormat.EMULATED_FP4]
