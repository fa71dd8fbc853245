"""The emulated FP8 layer against arithmetic done by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from precision.formats.formats import dequantize_block, quantize_block
from rollout_sglang.cpu.quantized import _apply, _remember_dequantized, dequantized


def method(*, block: list[int] | None, serialized: bool) -> SimpleNamespace:
    return SimpleNamespace(
        block_quant=block is not None, weight_block_size=block, is_checkpoint_fp8_serialized=serialized
    )


def layer_of(weight: torch.Tensor, **more: object) -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    for name, value in more.items():
        setattr(layer, name, value)
    return layer


def refresh(how: SimpleNamespace, layer: torch.nn.Module) -> None:
    _remember_dequantized(lambda: None, how, layer)


def test_per_tensor_rounds_weight_and_activation_to_e4m3() -> None:
    # Scales are 448/448 = 1, so e4m3 itself rounds: 17 → 16 (steps of 2 from 16 on, ties to even), 300 → 288.
    layer = layer_of(torch.tensor([[448.0, 17.0], [1.0, 300.0]]))
    how = method(block=None, serialized=False)
    refresh(how, layer)
    torch.testing.assert_close(layer.dequantized_weight, torch.tensor([[448.0, 16.0], [1.0, 288.0]]), rtol=0, atol=0)
    output = _apply(lambda: None, how, layer, torch.tensor([[448.0, 17.0]]), torch.tensor([1.0, 2.0]))  # type: ignore[arg-type, return-value]
    expected = torch.tensor([[448.0 * 448 + 16 * 16 + 1, 448.0 + 16 * 288 + 2]])
    torch.testing.assert_close(output, expected, rtol=0, atol=0)


def test_new_weights_replace_what_was_remembered_and_the_parameter_stays() -> None:
    layer = layer_of(torch.full((2, 2), 3.0))
    parameter = layer.weight
    how = method(block=None, serialized=False)
    refresh(how, layer)
    layer.weight.data.copy_(torch.full((2, 2), 5.0))
    refresh(how, layer)
    assert layer.weight is parameter
    torch.testing.assert_close(layer.dequantized_weight, torch.full((2, 2), 5.0))


def test_blocks_are_dequantized_with_their_own_scales() -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.01, 1, 384)
    quantized, scale = quantize_block(weight)
    layer = layer_of(quantized, weight_scale_inv=torch.nn.Parameter(scale), orig_dtype=torch.bfloat16)
    value = dequantized(method(block=[128, 128], serialized=True), layer)
    assert value.dtype == torch.bfloat16
    torch.testing.assert_close(value, dequantize_block(quantized, scale).bfloat16(), rtol=0, atol=0)


def test_block_activations_have_a_scale_for_each_group() -> None:
    # One scale for the whole token would round the second group, 448 times smaller, to multiples of 2^-9.
    x = torch.cat([torch.full((1, 128), 448.0), torch.full((1, 128), 0.7)], dim=1)
    layer = layer_of(torch.empty(0), dequantized_weight=torch.eye(256))
    grouped = _apply(lambda: None, method(block=[128, 128], serialized=True), layer, x)  # type: ignore[arg-type, return-value]
    whole = _apply(lambda: None, method(block=None, serialized=False), layer, x)  # type: ignore[arg-type, return-value]
    torch.testing.assert_close(grouped, x)
    assert whole[0, 128].item() == 0.6875


def stored(activation_scheme: str) -> SimpleNamespace:
    how = method(block=None, serialized=True)
    how.quant_config = SimpleNamespace(activation_scheme=activation_scheme)
    return how


def test_a_stored_stack_is_dequantized_part_by_part() -> None:
    quantized = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).to(torch.float8_e4m3fn)
    layer = layer_of(quantized, weight_scale=torch.tensor([0.5, 10.0]), logical_widths=[2, 1], orig_dtype=torch.float32)
    expected = torch.tensor([[0.5, 1.0], [1.5, 2.0], [50.0, 60.0]])
    torch.testing.assert_close(dequantized(stored("dynamic"), layer), expected, rtol=0, atol=0)


def test_a_stored_scale_of_activations_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="activation_scheme dynamic"):
        dequantized(stored("static"), layer_of(torch.zeros(1, 1)))


def test_blocks_of_another_size_are_refused() -> None:
    """Activations would be rounded in groups that are not the checkpoint's."""
    with pytest.raises(NotImplementedError, match=r"blocks of \(128, 128\), this checkpoint has \(64, 64\)"):
        dequantized(method(block=[64, 64], serialized=True), layer_of(torch.zeros(1, 1)))
