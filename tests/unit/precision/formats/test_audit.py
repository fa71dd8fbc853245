"""The audit: nothing is found where all is right, and each fault is found under the name of its module."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from precision.formats.audit import Held, Scales, audit, formats_of
from precision.formats.formats import dequantize_block, quantize_block
from precision.formats.quant_map import QuantMap
from precision.formats.streams import quantize_state
from precision.formats.weight_statistics import emulated_modules, published_modules, sum_of_squares
from tests.support.examples import examples

DOWN = "model.layers.0.mlp.down_proj"


def weights(num_layers: int = 1, num_experts: int | None = None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    modules = QuantMap.for_decoder(num_layers, None, num_experts).fused_groups
    return {f"{module}.weight": torch.randn(256, 256, generator=generator) for group in modules for module in group}


def held_by_engine(quant_map: QuantMap, tensors: dict[str, Tensor]) -> dict[str, Held]:
    """What one rank that holds everything says."""
    return published_modules(quantize_state(tensors.items(), quant_map), quant_map)


@pytest.mark.parametrize("rollout_format", ["fp8_block", "fp8_tensor", "emulated_fp6", "emulated_nvfp4"])
@pytest.mark.parametrize("experts", [None, 2])
def test_a_right_engine(rollout_format: str, experts: int | None) -> None:
    quant_map = QuantMap.for_decoder(1, rollout_format, experts).promoted(["model.layers.0.self_attn.qkv_proj"])
    held = held_by_engine(quant_map, weights(1, experts))
    assert set(held) == set(formats_of(quant_map, "float32"))
    assert audit([held], formats_of(quant_map, "float32"), held) == []
    emulated = emulated_modules(weights(1, experts).items(), quant_map)
    assert audit([held], formats_of(quant_map, "float32"), emulated) == []


def test_a_layer_in_another_format_is_named() -> None:
    quant_map = QuantMap.for_decoder(2, "fp8_block")
    other = held_by_engine(quant_map.promoted([DOWN]), weights(2))
    (finding,) = audit([other], formats_of(quant_map, "bfloat16"))
    assert (finding.module, finding.kind) == (DOWN, "format")
    assert str(finding) == f"{DOWN}: it is fp8_block in the quant map, but the engine holds it as float32"
    (other_way,) = audit([held_by_engine(quant_map, weights(2))], formats_of(quant_map.promoted([DOWN]), "float32"))
    assert "it is float32 in the quant map, but the engine holds it as fp8_block" in str(other_way)


def test_exceptions_in_another_dtype_than_the_engines_are_named() -> None:
    quant_map = QuantMap.for_decoder(1, "fp8_block").promoted([DOWN])
    (finding,) = audit([held_by_engine(quant_map, weights())], formats_of(quant_map, "bfloat16"))
    assert "it is bfloat16 in the quant map, but the engine holds it as float32" in str(finding)


def test_ranks_that_differ_are_named() -> None:
    quant_map = QuantMap.for_decoder(1, "fp8_block")
    one, other = (held_by_engine(each, weights()) for each in (quant_map, quant_map.promoted([DOWN])))
    (finding,) = audit([one, other], formats_of(quant_map, "float32"))
    assert (finding.module, finding.kind) == (DOWN, "two formats")
    assert "different formats: float32, fp8_block" in str(finding)
    (finding,) = audit([one, {name: held for name, held in one.items() if name != DOWN}], {})[-1:]
    assert (finding.module, finding.kind) == (DOWN, "missing")


def test_what_is_not_in_the_map_must_not_be_quantized() -> None:
    router = replace(held_by_engine(QuantMap.for_decoder(1, "fp8_block"), weights())[DOWN])
    (finding,) = audit([{"model.layers.0.mlp.gate": router}], {})
    assert finding.kind == "format"
    assert "the quant map leaves it as it is, but the engine holds it as fp8_block" in str(finding)
    assert formats_of(None, "bfloat16") == {}


def test_a_row_scale_serves_a_tensor_format() -> None:
    held = Held(layout="fp8_channel", dtype="float8_e4m3fn", num_values=4)
    assert audit([{DOWN: held}], {DOWN: "fp8_tensor"}) == []
    assert audit([{DOWN: held}], {DOWN: "fp8_block"}) != []


@pytest.mark.parametrize("whole_module", [True, False])
def test_a_wrong_scale_is_named(whole_module: bool) -> None:
    """All scales of a module 1.25 times too large, or one of them."""
    quant_map = QuantMap.for_decoder(1, "fp8_block")
    published = dict(quantize_state(weights().items(), quant_map))
    expected = published_modules(published.items(), quant_map)
    scales = published[f"{DOWN}.weight_scale_inv"]
    scales[... if whole_module else (0, 1)] *= 1.25
    findings = audit([published_modules(published.items(), quant_map)], formats_of(quant_map, "bfloat16"), expected)
    assert {finding.module for finding in findings} == {DOWN}
    assert findings[0].kind == "scales"
    assert not whole_module or "smallest of its weight scales" in str(findings[0])


def test_wrong_values_are_named_where_there_are_no_scales() -> None:
    quant_map = QuantMap.for_decoder(1, "fp8_tensor")
    expected = held_by_engine(quant_map, weights())
    wrong = weights()
    wrong[f"{DOWN}.weight"] *= 1.25
    (finding,) = audit([held_by_engine(quant_map, wrong)], formats_of(quant_map, "bfloat16"), expected)
    assert (finding.module, finding.kind) == (DOWN, "values")
    assert "the norm of the values that the engine multiplies by" in str(finding)


@pytest.mark.parametrize("copies", [1, 2])
def test_shards_add_up(copies: int) -> None:
    """Two ranks with half of the rows each; or, of a shared key head, four with two copies of each half."""
    quant_map = QuantMap.for_decoder(1, "fp8_block")
    tensors = weights()
    expected = held_by_engine(quant_map, tensors)
    halves = [
        held_by_engine(quant_map, {name: tensor[rows] for name, tensor in tensors.items()})
        for rows in (slice(0, 128), slice(128, 256))
    ]
    assert audit(halves * copies, formats_of(quant_map, "bfloat16"), expected) == []
    halves[1][DOWN] = replace(halves[1][DOWN], squares=9 * (halves[1][DOWN].squares or 0))
    assert [finding.kind for finding in audit(halves * copies, {}, expected) if finding.kind != "format"] == []
    found = audit(halves * copies, formats_of(quant_map, "bfloat16"), expected)
    assert [(finding.module, finding.kind) for finding in found] == [(DOWN, "values")]
    (shape,) = audit(halves[:1], formats_of(quant_map, "bfloat16"), {DOWN: expected[DOWN]})
    assert shape.kind == "shape"


def test_descriptions_travel_as_text() -> None:
    held = Held(
        layout="a", dtype="b", num_values=3, squares=0.1, scales=Scales(count=2, smallest=1, largest=2, total=3)
    )
    for one in (held, replace(held, squares=None, scales=None)):
        assert Held.from_json(json.dumps(asdict(one))) == one
    for text in ("00ff", "[]", '{"layout": 1}', '{"layout": "a", "more": 2}'):
        with pytest.raises(ValueError, match=r".+"):
            Held.from_json(text)


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from(["none", "one", "rows", "blocks"]), st.integers(0, 9))
@example(128, 16384, "blocks", 0)  # as many blocks as rows
@example(128, 16384, "rows", 0)
@settings(max_examples=examples(40))
def test_sum_of_squares(rows: int, columns: int, kind: str, seed: int) -> None:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    quantized, blocks = quantize_block(values)
    scales = {"none": None, "one": torch.tensor(0.3), "rows": torch.rand(rows) + 0.5, "blocks": blocks}[kind]
    stored = quantized if kind == "blocks" else values
    exact = values if scales is None else values * scales.reshape(-1, 1) if kind != "blocks" else None
    exact = dequantize_block(quantized, blocks) if exact is None else exact
    expected = float(exact.double().square().sum())
    assert sum_of_squares(stored, scales) == pytest.approx(expected, rel=1e-5)
    stack = torch.stack([stored, stored])
    twice = None if scales is None else torch.stack([scales, scales])
    assert sum_of_squares(stack, twice) == pytest.approx(2 * expected, rel=1e-5)
