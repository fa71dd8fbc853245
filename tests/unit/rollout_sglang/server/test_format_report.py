"""What an engine's layers are reported as: by names of classes and attributes as SGLang 0.5.23 has them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from precision.formats.audit import Held, audit
from precision.formats.formats import dequantize_block, quantize_block, scale_of, to_e4m3
from precision.formats.rollout_format import RolloutFormat
from rollout_sglang.server import format_report


class UnquantizedLinearMethod:
    pass


class UnquantizedFusedMoEMethod:
    pass


class AWQLinearMethod:
    pass


class Fp8LinearMethod:
    def __init__(self, block: list[int] | None, use_mxfp8: bool = False) -> None:
        self.block_quant, self.use_mxfp8 = block is not None, use_mxfp8
        self.quant_config = SimpleNamespace(weight_block_size=block)


class Fp8MoEMethod(Fp8LinearMethod):
    pass


def layer(method: Any, **tensors: Any) -> nn.Module:
    made = nn.Module()
    made.quant_method = method
    for name, value in tensors.items():
        setattr(made, name, nn.Parameter(value, requires_grad=False) if isinstance(value, Tensor) else value)
    return made


def report(name: str, made: nn.Module) -> dict[str, Held]:
    """Of a model that holds one layer under that name."""
    model = nn.Module()
    *path, last = name.split(".")
    parent = model
    for part in path:
        parent.add_module(part, nn.Module())
        parent = parent.get_submodule(part)
    parent.add_module(last, made)
    return dict(format_report.held_modules(model))


def gaussian(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def norm_of(held: Held) -> float:
    assert held.squares is not None
    return float(held.squares**0.5)


def test_stacked_parts_are_told_apart() -> None:
    weight = gaussian(512, 256) * torch.cat([torch.full((256, 1), 1.0), torch.full((128, 1), 2.0), torch.ones(128, 1)])
    quantized, scales = quantize_block(weight)
    made = layer(
        Fp8LinearMethod([128, 128]), weight=quantized, weight_scale_inv=scales, output_partition_sizes=[256, 128, 128]
    )
    found = report("layers.0.self_attn.qkv_proj", made)
    assert list(found) == [f"layers.0.self_attn.{part}_proj" for part in "qkv"]
    exact = dequantize_block(quantized, scales)
    for held, rows in zip(found.values(), (slice(0, 256), slice(256, 384), slice(384, 512)), strict=True):
        assert (held.layout, held.dtype) == ("fp8_block", "float8_e4m3fn")
        assert norm_of(held) == pytest.approx(float(exact[rows].norm()), rel=1e-5)
        assert held.scales is not None
        assert held.scales.count == (rows.stop - rows.start) // 128 * 2
        assert held.scales.total == pytest.approx(float(scales[rows.start // 128 : rows.stop // 128].sum()))


def test_a_stack_with_as_many_blocks_as_rows_keeps_the_scales_of_each_part() -> None:
    uneven = torch.ones(16384)
    uneven[:8192:128] = 100.0  # half of the blocks have a column that dwarfs the others
    parts = [gaussian(rows, 16384) * size * uneven for rows, size in ((256, 1.0), (128, 5.0), (128, 1.0))]
    quantized, scales = quantize_block(torch.cat(parts))
    made = layer(
        Fp8LinearMethod([128, 128]),
        weight=quantized,
        weight_scale_inv=scales,
        output_partition_sizes=[256, 128, 128],
    )
    found = report("model.layers.0.self_attn.qkv_proj", made)
    for name, part in zip("qkv", parts, strict=True):
        assert norm_of(found[f"model.layers.0.self_attn.{name}_proj"]) == pytest.approx(float(part.norm()), rel=0.01)


def test_a_channel_scale_beside_a_transposed_weight() -> None:
    weight = gaussian(256, 256)
    scale = scale_of(weight.abs().amax())
    quantized = to_e4m3(weight / scale)
    rows = scale.repeat(256)[:, None]
    made = layer(Fp8LinearMethod(None), weight_scale=rows, output_partition_sizes=[128, 128])
    made.weight = nn.Parameter(quantized.t(), requires_grad=False)
    found = report("layers.0.mlp.gate_up_proj", made)
    assert [held.layout for held in found.values()] == ["fp8_channel", "fp8_channel"]
    for held, part in zip(found.values(), (quantized[:128], quantized[128:]), strict=True):
        assert norm_of(held) == pytest.approx(float((part.float() * scale).norm()), rel=1e-5)


def test_an_emulated_format_is_reported_by_its_name_and_its_values_are_the_weights() -> None:
    class EmulatedLinearMethod:
        rollout_format = RolloutFormat.EMULATED_NVFP4

    weight = gaussian(4, 32)
    made = layer(EmulatedLinearMethod(), weight=weight, output_partition_sizes=[4])
    found = report("layers.0.mlp.down_proj", made)["layers.0.mlp.down_proj"]
    assert (found.layout, found.dtype, found.scales) == ("emulated_nvfp4", "float32", None)
    assert norm_of(found) == pytest.approx(float(weight.norm()), rel=1e-5)


def test_what_a_cpu_multiplies_by_is_asked_before_its_parameter() -> None:
    made = layer(
        Fp8LinearMethod(None),
        weight=torch.ones(2, 2),
        output_partition_sizes=[2],
        dequantized_weight=2 * torch.ones(2, 2),
    )
    found = report("layers.0.mlp.down_proj", made)["layers.0.mlp.down_proj"]
    assert (found.layout, found.dtype, found.scales) == ("fp8_tensor", "float32", None)
    assert norm_of(found) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("method", "layout"),
    [
        (UnquantizedLinearMethod(), "full"),
        (AWQLinearMethod(), "AWQLinearMethod"),
        (Fp8LinearMethod([1, 32], use_mxfp8=True), "mxfp8"),
        (Fp8LinearMethod([64, 64]), "fp8 in blocks of [64, 64]"),
    ],
)
def test_methods(method: Any, layout: str) -> None:
    made = layer(method, weight=gaussian(4, 4).bfloat16(), output_partition_sizes=[4])
    found = report("layers.0.self_attn.o_proj", made)["layers.0.self_attn.o_proj"]
    assert (found.layout, found.dtype, found.num_values) == (layout, "bfloat16", 16)


def test_a_block_layer_whose_weight_is_not_e4m3_is_not_called_one() -> None:
    made = layer(Fp8LinearMethod([128, 128]), weight=gaussian(128, 128), output_partition_sizes=[128])
    assert report("a.o_proj", made)["a.o_proj"].layout != "fp8_block"


def test_packed_scales_are_a_layout_of_their_own_which_the_audit_refuses() -> None:
    quantized, _ = quantize_block(gaussian(128, 128))
    packed = torch.ones(128, 1, dtype=torch.int32)
    made = layer(Fp8LinearMethod([128, 128]), weight=quantized, weight_scale_inv=packed, output_partition_sizes=[128])
    held = report("a.o_proj", made)["a.o_proj"]
    assert (held.squares, held.scales) == (None, None)
    (finding,) = audit([{"a.o_proj": held}], {"a.o_proj": "fp8_block"})
    assert str(finding) == (
        "a.o_proj: it is fp8_block in the quant map, but the engine holds it as fp8 in blocks of [128, 128] with "
        "packed power-of-two scales"
    )


def test_a_mixture_is_two_modules() -> None:
    first, second = gaussian(3, 256, 128), gaussian(3, 128, 128)
    made = layer(UnquantizedFusedMoEMethod(), w13_weight=first, w2_weight=second)
    found = report("layers.0.mlp.experts", made)
    assert list(found) == ["layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj"]
    assert norm_of(found["layers.0.mlp.experts.down_proj"]) == pytest.approx(float(second.norm()), rel=1e-5)
    pairs = [quantize_block(matrix) for matrix in first]
    blocks = layer(
        Fp8MoEMethod([128, 128]),
        w13_weight=torch.stack([quantized for quantized, _ in pairs]),
        w13_weight_scale_inv=torch.stack([scales for _, scales in pairs]),
        w2_weight=second,
    )
    held = report("layers.0.mlp.experts", blocks)["layers.0.mlp.experts.gate_up_proj"]
    exact = torch.stack([dequantize_block(*pair) for pair in pairs])
    assert (held.layout, held.num_values) == ("fp8_block", first.numel())
    assert norm_of(held) == pytest.approx(float(exact.norm()), rel=1e-5)


def test_formats_alone_read_no_weight() -> None:
    class Unreadable(torch.Tensor):
        def float(self, *_: Any, **__: Any) -> Tensor:
            raise AssertionError("the weight was read")

    made = layer(UnquantizedLinearMethod(), output_partition_sizes=[4])
    made.weight = nn.Parameter(torch.ones(4, 4).as_subclass(Unreadable), requires_grad=False)
    with pytest.raises(AssertionError, match="was read"):
        list(format_report.held_modules(made))
    model = nn.Module()
    model.add_module("o_proj", made)
    (held,) = dict(format_report.held_modules(model, statistics=False)).values()
    assert (held.layout, held.num_values, held.squares, held.scales) == ("full", 16, None, None)


class RadixAttention(nn.Module):
    k_scale_float: float | None = None
    v_scale_float: float | None = None


def test_an_fp8_cache_is_reported_with_its_scales_and_is_a_finding() -> None:
    model = nn.Module()
    model.attn = RadixAttention()
    assert list(format_report.held_caches(model, "auto")) == []
    assert list(format_report.held_caches(model, "bf16")) == []
    default = dict(format_report.held_caches(model, "fp8_e4m3"))
    (finding,) = audit([default], {})
    assert str(finding) == (
        "attn: the engine keeps keys and values in fp8_e4m3 with scales 1 to 1, SGLang's default, which nobody has "
        "calibrated"
    )
    model.attn.k_scale_float, model.attn.v_scale_float = 0.5, 0.25
    model.quant_config = SimpleNamespace(kv_cache_quant_algo="FP8")
    (calibrated,) = audit([dict(format_report.held_caches(model, "auto"))], {})
    assert str(calibrated) == "attn: the engine keeps keys and values in fp8 with scales 0.25 to 0.5"


class Checker:
    """SGLang's WeightChecker."""

    def __init__(self, model: nn.Module) -> None:
        self._get_model = lambda: model

    def _parallelism_info(self, **_: Any) -> Any:
        return SimpleNamespace(model_dump=lambda: dict(tp_rank=0, tp_size=1))


@pytest.mark.parametrize(("graph", "named"), [("graph", {"weight"}), ("eager", set()), (None, set())])
def test_weights_that_left_the_place_where_graphs_read_them_are_named(graph: str | None, named: set[str]) -> None:
    model = nn.Linear(2, 2)
    runner = SimpleNamespace(
        model=model, eager_runner="eager", decode_cuda_graph_runner=graph, prefill_cuda_graph_runner=None
    )
    format_report.note_addresses(None, runner)

    def moved() -> set[str]:
        return set(format_report.handle(lambda *_: None, Checker(model), "moved")["checksums"])

    model.bias.data.copy_(torch.ones(2))
    assert moved() == set(), "written in place"
    kept, model.weight = model.weight, nn.Parameter(torch.ones(2, 2))
    assert moved() == named
    assert kept is not model.weight
