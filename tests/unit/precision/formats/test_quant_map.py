"""The quant map: exact names, fused scales, streaming, and an audit that notices a model it does not fit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from precision.formats.formats import E4M3, dequantize_block, fake_quantize
from precision.formats.quant_map import QuantMap, QuantMapFile
from precision.formats.rollout_format import RolloutFormat
from precision.formats.streams import fake_quantize_state, quantize_state
from tests.support.examples import examples

SHAPES = {
    "self_attn.q_proj": (256, 130),
    "self_attn.k_proj": (128, 130),
    "self_attn.v_proj": (128, 130),
    "self_attn.o_proj": (130, 256),
    "mlp.gate_proj": (256, 130),
    "mlp.up_proj": (256, 130),
    "mlp.down_proj": (130, 256),
}
UNTOUCHED = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")

Stream = Callable[[Iterable[tuple[str, Tensor]], QuantMap], Iterator[tuple[str, Tensor]]]


def state(num_layers: int = 2) -> dict[str, Tensor]:
    """An HF state in its usual order, every projection of another magnitude, with biases and norms."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(11, 130, generator=generator)}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = torch.randn(130, generator=generator)
        for power, (module, shape) in enumerate(SHAPES.items()):
            tensors[f"{prefix}{module}.weight"] = 10.0 ** (power - 3) * torch.randn(*shape, generator=generator)
        tensors[prefix + "self_attn.q_proj.bias"] = torch.randn(256, generator=generator)
        tensors[prefix + "self_attn.q_norm.weight"] = torch.randn(32, generator=generator)
    tensors["model.norm.weight"] = torch.randn(130, generator=generator)
    tensors["lm_head.weight"] = torch.randn(11, 130, generator=generator)
    return tensors


@pytest.mark.parametrize("rollout_format", ["fp8_tensor", "fp8_block"])
def test_map_names_every_projection_and_nothing_else(rollout_format: str) -> None:
    quant_map = QuantMap.for_decoder(2, rollout_format)
    weights = {name.removesuffix(".weight") for name in state() if name.endswith(".weight")}
    expected = {f"model.layers.{layer}.{module}" for layer in range(2) for module in SHAPES}
    assert weights & quant_map.formats.keys() == expected == set(quant_map.formats)
    assert quant_map.formats["model.layers.1.mlp.up_proj"] == rollout_format
    for other in ("lm_head", "model.layers.2.mlp.up_proj", "layers.1.mlp.up_proj", "model.layers.1.mlp.up_proj.weight"):
        assert other not in quant_map.formats


def test_every_expert_is_quantized_for_itself_and_the_router_is_not() -> None:
    quant_map = QuantMap.for_decoder(2, "fp8_tensor", num_experts=3)
    assert len(quant_map.formats) == 2 * (4 + 3 * 3)
    expert = "model.layers.1.mlp.experts.2."
    assert (expert + "gate_proj", expert + "up_proj") in quant_map.fused_groups
    assert (expert + "down_proj",) in quant_map.fused_groups
    assert quant_map.formats["model.layers.1.self_attn.o_proj"] == "fp8_tensor"
    for other in ("model.layers.1.mlp.gate", "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.experts.3.up_proj"):
        assert other not in quant_map.formats
    with pytest.raises(ValueError, match="num_experts is 0"):
        QuantMap.for_decoder(1, "fp8_block", num_experts=0)


def test_tensor_scales_are_shared_within_an_expert_and_not_between_experts() -> None:
    names = [f"model.layers.0.mlp.experts.{e}.{part}_proj.weight" for e in range(2) for part in ("gate", "up", "down")]
    tensors = {name: 10.0**power * torch.eye(2) for power, name in enumerate(names)}
    quant_map = QuantMap.for_decoder(1, "fp8_tensor", num_experts=2)
    share = quant_map.restricted(name.removesuffix(".weight") for name in names)
    emulated = dict(fake_quantize_state(tensors.items(), share))
    for expert in range(2):
        gate, up, down = names[3 * expert : 3 * expert + 3]
        # Largest value of gate and up is up's: 448 e4m3 units. gate is a tenth: 44.8 units, rounded to 44.
        assert emulated[up][0, 0] == tensors[up][0, 0]
        assert emulated[gate][0, 0] == pytest.approx(tensors[up][0, 0] * 44 / 448)
        assert emulated[down][0, 0] == tensors[down][0, 0]


@pytest.mark.parametrize("stream", [quantize_state, fake_quantize_state])
def test_a_share_is_audited_as_a_whole_model_is(stream: Stream) -> None:
    whole = QuantMap.for_decoder(2, "fp8_block")
    second = {name: tensor for name, tensor in state().items() if ".1." in name or "norm" in name}
    share = whole.restricted(name.removesuffix(".weight") for name in second)
    assert set(share.formats) == {module for module in whole.formats if ".1." in module}
    assert len(share.fused_groups) == 4
    list(stream(second.items(), share))
    del second["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(ValueError, match=r"1 modules of the quant map had no weight, the first .*1\.mlp\.down_proj"):
        list(stream(second.items(), share))


def test_a_share_keeps_its_exceptions() -> None:
    """As a pipeline stage sends them: unquantized, and missed when they do not come."""
    down = "model.layers.1.mlp.down_proj"
    second = {name: tensor for name, tensor in state().items() if ".1." in name}
    share = (
        QuantMap.for_decoder(2, "fp8_block")
        .promoted([down])
        .restricted(name.removesuffix(".weight") for name in second)
    )
    assert share.ignored_layers() == (down,)
    assert torch.equal(dict(quantize_state(second.items(), share))[f"{down}.weight"], second[f"{down}.weight"])
    del second[f"{down}.weight"]
    with pytest.raises(ValueError, match=r"1 modules .* first model\.layers\.1\.mlp\.down_proj"):
        list(quantize_state(second.items(), share))


def test_a_share_must_not_cut_a_stack() -> None:
    with pytest.raises(ValueError, match=r"k_proj, .*v_proj are stacked .* only model\.layers\.0\.self_attn\.q_proj"):
        QuantMap.for_decoder(1, "fp8_block").restricted(["model.layers.0.self_attn.q_proj"])


def test_hf_config() -> None:
    assert QuantMap.for_decoder(1, "fp8_block").to_hf_quantization_config() == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
    }
    assert QuantMap.for_decoder(1, "fp8_tensor").to_hf_quantization_config() is None
    ignored = ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]
    config = QuantMap.for_decoder(1, "fp8_block").promoted(ignored).to_hf_quantization_config()
    assert config is not None
    assert config["ignored_layers"] == config["modules_to_not_convert"] == ignored
    mixed = QuantMap({"a": RolloutFormat.FP8_TENSOR, "b": RolloutFormat.FP8_BLOCK}, (("a",), ("b",)))
    with pytest.raises(ValueError, match="mixes formats"):
        mixed.to_hf_quantization_config()


@pytest.mark.parametrize("rollout_format", ["fp8_tensor", "fp8_block"])
def test_exceptions_pass_both_streams_unchanged(rollout_format: str) -> None:
    full = ("model.layers.1.mlp.down_proj", "model.layers.0.self_attn.k_proj")
    quant_map = QuantMap.for_decoder(2, rollout_format).promoted(full)
    for stream in (quantize_state, fake_quantize_state):
        made = dict(stream(state().items(), quant_map))
        for module in quant_map.ignored_layers():
            assert torch.equal(made[module + ".weight"], state()[module + ".weight"])
        assert {name for name in made if name.endswith("_scale_inv")} <= {
            f"{module}.weight_scale_inv" for module in quant_map.formats
        }
    changed = dict(fake_quantize_state(state().items(), quant_map))
    for module in quant_map.formats:
        assert not torch.equal(changed[module + ".weight"], state()[module + ".weight"])
    without = {name: tensor for name, tensor in state().items() if "1.mlp.down" not in name}
    with pytest.raises(ValueError, match=r"first model\.layers\.1\.mlp\.down_proj"):
        list(quantize_state(without.items(), quant_map))


def test_maps_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a \(fp8_block\), b \(full\) are stacked by the engine but differ"):
        QuantMap({"a": RolloutFormat.FP8_BLOCK}, (("a", "b"),))
    with pytest.raises(ValueError, match="a is in two fused groups"):
        QuantMap({}, (("a", "b"), ("a",)))
    with pytest.raises(ValueError, match="no linear layer 'down', the nearest name is down_proj"):
        QuantMap({"down": RolloutFormat.FP8_BLOCK}, (("a", "b"), ("down_proj",)))
    with pytest.raises(ValueError, match="differ in format"):
        QuantMap({"a": RolloutFormat.FP8_BLOCK, "b": RolloutFormat.FP8_TENSOR}, (("a", "b"),))
    with pytest.raises(ValueError, match="'fp4', expected one of fp8_tensor, fp8_block"):
        QuantMap.for_decoder(1, "fp4")
    with pytest.raises(ValueError, match="num_layers is 0"):
        QuantMap.for_decoder(0, "fp8_block")


def test_block_state_holds_e4m3_and_scales_that_restore_the_emulated_weights() -> None:
    quant_map = QuantMap.for_decoder(2, "fp8_block")
    stored = dict(quantize_state(state().items(), quant_map))
    emulated = dict(fake_quantize_state(state().items(), quant_map))
    assert set(stored) == set(state()) | {f"{module}.weight_scale_inv" for module in quant_map.formats}
    assert list(emulated) == list(state())
    for name, tensor in state().items():
        module = name.removesuffix(".weight")
        if module in quant_map.formats:
            scale_inv = stored[f"{module}.weight_scale_inv"]
            assert stored[name].dtype is E4M3
            assert torch.equal(dequantize_block(stored[name], scale_inv), emulated[name])
            assert not torch.equal(emulated[name], tensor)
        else:
            assert torch.equal(stored[name], tensor)
            assert torch.equal(emulated[name], tensor)


def test_stacking_block_quantized_parts_is_quantizing_the_stack() -> None:
    """Rows of q, k and gate are multiples of 128, so the engine may stack before or after."""
    emulated = dict(fake_quantize_state(state(1).items(), QuantMap.for_decoder(1, "fp8_block")))
    names = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
    stacked = fake_quantize(torch.cat([state(1)[name] for name in names]), RolloutFormat.FP8_BLOCK)
    assert torch.equal(torch.cat([emulated[name] for name in names]), stacked)


def test_tensor_state_passes_to_the_engine_unchanged() -> None:
    stored = dict(quantize_state(state().items(), QuantMap.for_decoder(2, "fp8_tensor")))
    assert list(stored) == list(state())
    assert all(torch.equal(stored[name], tensor) for name, tensor in state().items())


def test_tensor_emulation_has_one_scale_a_stacked_matrix() -> None:
    """What the engine does: stack q, k, v (gate, up), quantize the stack with one scale, multiply."""
    original = state()
    emulated = dict(fake_quantize_state(original.items(), QuantMap.for_decoder(2, "fp8_tensor")))
    assert set(emulated) == set(original)
    for layer in range(2):
        for parts in (("self_attn.q", "self_attn.k", "self_attn.v"), ("self_attn.o",), ("mlp.gate", "mlp.up")):
            names = [f"model.layers.{layer}.{part}_proj.weight" for part in parts]
            stack = fake_quantize(torch.cat([original[name] for name in names]), RolloutFormat.FP8_TENSOR)
            assert torch.equal(torch.cat([emulated[name] for name in names]), stack)
    q = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(
        emulated[q], fake_quantize(original[q], RolloutFormat.FP8_TENSOR)
    )  # v is 100 times larger than q
    for name in UNTOUCHED:
        assert torch.equal(emulated[name], original[name])


def test_emulation_streams_and_finds_group_members_that_lie_apart() -> None:
    quant_map = QuantMap.for_decoder(2, "fp8_tensor")
    reference = dict(fake_quantize_state(state().items(), quant_map))
    backwards = dict(fake_quantize_state(reversed(state().items()), quant_map))
    assert set(backwards) == set(reference)
    assert all(torch.equal(backwards[name], tensor) for name, tensor in reference.items())
    drawn: list[str] = []

    def watched() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in state().items():
            drawn.append(name)
            yield name, tensor

    stream = fake_quantize_state(watched(), quant_map)
    for name, _ in stream:
        if name.endswith("layers.0.mlp.down_proj.weight"):
            break
    assert not any("layers.1" in name for name in drawn)


def test_dtype_is_kept() -> None:
    halves = {name: tensor.bfloat16() for name, tensor in state(1).items()}
    for rollout_format in RolloutFormat:
        emulated = dict(fake_quantize_state(halves.items(), QuantMap.for_decoder(1, rollout_format)))
        assert {tensor.dtype for tensor in emulated.values()} == {torch.bfloat16}


@pytest.mark.parametrize("stream", [quantize_state, fake_quantize_state])
def test_a_module_that_never_came_is_an_error(stream: Stream) -> None:
    for rollout_format in (RolloutFormat.FP8_TENSOR, RolloutFormat.FP8_BLOCK):
        with pytest.raises(ValueError, match="7 modules of the quant map had no weight"):
            list(stream(state(1).items(), QuantMap.for_decoder(2, rollout_format)))


@pytest.mark.parametrize("rollout_format", list(RolloutFormat))
def test_a_non_finite_weight_is_named(rollout_format: RolloutFormat) -> None:
    broken = state(1)
    broken["model.layers.0.self_attn.k_proj.weight"][0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match=r"^model\.layers\.0\.self_attn\.k_proj\.weight: "):
        list(fake_quantize_state(broken.items(), QuantMap.for_decoder(1, rollout_format)))


@pytest.mark.parametrize("rollout_format", [name for name in RolloutFormat if name.is_emulated])
def test_engines_are_sent_what_the_learner_emulates_bit_for_bit(rollout_format: RolloutFormat) -> None:
    full = ["model.layers.1.self_attn.qkv_proj"]
    quant_map = QuantMap.for_decoder(2, rollout_format).promoted(full)
    for dtype in (torch.float32, torch.bfloat16):
        weights = {name: weight.to(dtype) for name, weight in state().items()}
        sent = dict(quantize_state(weights.items(), quant_map))
        emulated = dict(fake_quantize_state(weights.items(), quant_map))
        assert sent.keys() == emulated.keys() == weights.keys()
        for name, weight in weights.items():
            assert sent[name].dtype is dtype
            assert torch.equal(sent[name], emulated[name])
            assert torch.equal(sent[name], weight) != (name.removesuffix(".weight") in quant_map.formats)
    config = quant_map.to_hf_quantization_config()
    ignored = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
    assert config == dict(
        quant_method="evenkeel_emulated", format=rollout_format, ignored_layers=ignored, modules_to_not_convert=ignored
    )


@pytest.mark.parametrize("rollout_format", [RolloutFormat.FP8_CHANNEL, RolloutFormat.MXFP8])
def test_formats_that_are_not_served_are_emulated_and_not_sent(rollout_format: RolloutFormat) -> None:
    quant_map = QuantMap.for_decoder(2, rollout_format)
    emulated = dict(fake_quantize_state(state().items(), quant_map))
    for name, weight in state().items():
        quantized = name.removesuffix(".weight") in quant_map.formats
        assert torch.equal(emulated[name], fake_quantize(weight, rollout_format) if quantized else weight)
    for refused in (lambda: list(quantize_state(state().items(), quant_map)), quant_map.to_hf_quantization_config):
        with pytest.raises(ValueError, match=f"{rollout_format} is emulated by the learner only"):
            refused()


DOWN = "model.layers.1.mlp.down_proj"


def test_a_base_and_named_exceptions(tmp_path: Path) -> None:
    path = tmp_path / "map.yaml"
    path.write_text(f"base: fp8_block\nexceptions:\n  {DOWN}: full\n")
    quant_map = QuantMap.from_file(QuantMapFile.read(path), num_layers=12)
    assert quant_map.ignored_layers() == (DOWN,)
    assert len(quant_map.formats) == 12 * 7 - 1
    assert quant_map.formats["model.layers.11.mlp.down_proj"] is RolloutFormat.FP8_BLOCK


def test_quantized_exceptions_of_an_unquantized_base() -> None:
    quant_map = QuantMap.from_file(QuantMapFile(base="full", exceptions={DOWN: "fp8_block"}), 2)
    assert set(quant_map.formats) == {DOWN}
    assert quant_map.to_file() == QuantMapFile(
        base="fp8_block", exceptions=dict.fromkeys(quant_map.ignored_layers(), "full")
    )


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("model.layers.1.mlp.down_prj", DOWN),
        ("layers.1.mlp.down_proj", DOWN),
        ("model.layers.1.mlp.down_proj.weight", DOWN),
        ("model.layers.2.mlp.down_proj", DOWN),
        ("model.layers.1.mlp", "model.layers.1.mlp"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=rf"no linear layer {name!r}, the nearest name is {nearest}"):
        QuantMap.from_file(QuantMapFile(base="fp8_block", exceptions={name: "full"}), 2)


def test_dtypes_must_be_the_engines() -> None:
    file = QuantMapFile(base="fp8_block", exceptions={DOWN: "bf16"})
    file.check_dtype("bfloat16")
    QuantMapFile(base="fp8_block", exceptions={DOWN: "full"}).check_dtype("float32")
    with pytest.raises(ValueError, match=f"{DOWN} is bf16, but the engines of this run compute in float32"):
        file.check_dtype("float32")


GROUPS = tuple(QuantMap.for_decoder(12, None).groups)


@settings(max_examples=examples(50))
@given(st.sets(st.sampled_from(GROUPS)), st.sampled_from(list(RolloutFormat)), st.sampled_from([None, 2]))
def test_every_map_comes_back_from_its_file(full: set[str], base: RolloutFormat, experts: int | None) -> None:
    whole = QuantMap.for_decoder(12, base, experts)
    quant_map = whole.promoted(full & whole.groups.keys())
    file = quant_map.to_file()
    assert QuantMap.from_file(QuantMapFile.model_validate(file.model_dump()), 12, experts) == quant_map


def test_promoting_and_keeping() -> None:
    whole = QuantMap.for_decoder(2, "fp8_block")
    promoted = whole.promoted(["model.layers.0.self_attn.k_proj", DOWN])
    assert promoted.ignored_layers() == (*(f"model.layers.0.self_attn.{part}_proj" for part in "qkv"), DOWN)
    assert promoted.promoted(["model.layers.0.self_attn.qkv_proj", DOWN], to="fp8_block") == whole
    only = whole.only([DOWN])
    assert only.formats == {DOWN: "fp8_block"}
    assert only.fused_groups == whole.fused_groups
    assert whole.only([]).rollout_format is None
    assert whole.only([]).to_hf_quantization_config() is None
    for change in (whole.promoted, whole.only):
        with pytest.raises(ValueError, match=f"nearest name is {DOWN}"):
            change([DOWN + "x"])


@pytest.mark.parametrize("experts", [None, 12])
def test_no_name_of_an_exception_is_a_part_of_another_layers_name(experts: int | None) -> None:
    """Engines that look for substrings (SGLang before 0.5.23) still find the one layer: 1 is not taken for 11."""
    quant_map = QuantMap.for_decoder(12, "fp8_block", experts)
    for name, modules in quant_map.groups.items():
        ignored = quant_map.promoted([name]).ignored_layers()
        assert set(ignored) == ({name} if name.endswith(".experts") else set(modules))
        parts = [part.removeprefix("model.") for part in ignored]  # SGLang adds names without the prefix
        found = {group for group, others in quant_map.groups.items() for part in parts for one in others if part in one}
        assert found == {name}


def test_the_map_needs_no_torch() -> None:
    code = "import sys, precision.formats.quant_map; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
