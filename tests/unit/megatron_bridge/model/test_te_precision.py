"""What FP8 training asks for, and where it is refused. No FP8 is computed here: that takes a GPU."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.enums import Fp8Recipe
from megatron.core.fp8_utils import get_fp8_align_size

import megatron_bridge
from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.model import build
from megatron_bridge.model.build import build_chunks, choose_layers, require_fp8, transformer_config
from megatron_bridge.model.te_precision import fp8_arguments, token_multiple
from megatron_bridge.parallel.layout import Layout, check_longest_sample
from pipeline.config.recipe import LearnerPrecision, LearnerSection
from pipeline.errors import LayoutError, ModelError

DENSE = ModelConfig.from_hf(
    dict(
        architectures=["Qwen3ForCausalLM"],
        num_hidden_layers=2,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=512,
        vocab_size=64,
        max_position_embeddings=64,
    )
)
EIGHTS: list[LearnerPrecision] = ["fp8_tensor", "fp8_block", "fp8_delayed"]


@pytest.mark.parametrize(
    ("precision", "recipe", "format_"),
    [
        ("fp8_tensor", Fp8Recipe.tensorwise, "hybrid"),
        ("fp8_block", Fp8Recipe.blockwise, "e4m3"),
        ("fp8_delayed", Fp8Recipe.delayed, "hybrid"),
    ],
)
def test_megatron_takes_the_arguments(precision: LearnerPrecision, recipe: str, format_: str) -> None:
    config = transformer_config(DENSE, Layout(), torch.bfloat16, layers="transformer_engine", precision=precision)
    assert (config.fp8_recipe, config.fp8, config.fp8_param) == (recipe, format_, False)
    assert config.transformer_impl == "transformer_engine"
    assert not config.fp8_dot_product_attention
    assert config.bf16
    # A history of one micro-batch, Megatron's default, saturates whatever grows.
    assert precision != "fp8_delayed" or (config.fp8_amax_history_len, config.fp8_amax_compute_algo) == (1024, "max")


def test_tokens_are_padded_to_what_megatron_pads_experts_to_or_more() -> None:
    for precision in EIGHTS:
        assert token_multiple(precision) % get_fp8_align_size(fp8_arguments(precision)["fp8_recipe"]) == 0
    assert [token_multiple(precision) for precision in EIGHTS] == [16, 128, 16]


def test_block_scales_are_not_rounded_to_powers_of_two() -> None:
    """Read by Transformer Engine when it is imported, which importing anything of this room may do."""
    assert megatron_bridge.os is os
    assert os.environ["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] == "1"


def test_a_sample_must_fit_with_the_padding_that_fp8_adds() -> None:
    sizes: dict[str, Any] = dict(context_parallel=2, tensor_parallel=2, sequence_parallel=True)
    check_longest_sample(LearnerSection(precision="bf16", micro_batch_tokens=408, **sizes), 402)
    check_longest_sample(LearnerSection(precision="fp8_block", micro_batch_tokens=512, **sizes), 402)
    with pytest.raises(LayoutError, match=r"takes 512 when it is padded to a multiple of 512 for .* and FP8"):
        check_longest_sample(LearnerSection(precision="fp8_block", micro_batch_tokens=511, **sizes), 402)
    with pytest.raises(LayoutError, match="takes 448 when it is padded to a multiple of 64"):
        check_longest_sample(LearnerSection(precision="fp8_tensor", micro_batch_tokens=447, **sizes), 402)


def refusal(precision: LearnerPrecision, layers: Any = "transformer_engine", **changes: Any) -> str:
    layout = changes.pop("layout", Layout())
    with pytest.raises(ModelError, match=f"^learner.precision is {precision}") as refused:
        require_fp8(precision, layers, replace(DENSE, **changes), layout)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("precision", EIGHTS)
def test_a_cpu_is_refused(precision: LearnerPrecision) -> None:
    said = refusal(precision)
    assert "but there is no CUDA device; " in said
    assert "learner.fp8_emulation=true" in said
    with pytest.raises(ModelError, match="there is no CUDA device"):
        build_chunks(DENSE, Layout(), torch.bfloat16, 1.0, precision=precision)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


@pytest.mark.usefixtures("hopper")
def test_megatrons_own_layers_are_refused() -> None:
    assert "but the layers are Megatron's own" in refusal("fp8_tensor", "megatron")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        (Layout(tensor=4), dict(ffn_size=480), "intermediate_size / tensor_parallel is 120, not a multiple of 16"),
        (Layout(tensor=8), dict(head_dim=30), "query width / tensor_parallel is 15, not a multiple of 16"),
        (Layout(tensor=8), dict(num_kv_heads=1), "query, key and value width / tensor_parallel is 24, not a multiple"),
        (Layout(), dict(hidden_size=264), "hidden_size is 264, not a multiple of 16"),
        (Layout(tensor=2, sequence=True), dict(hidden_size=192), "hidden_size is 192, not a multiple of 128"),
    ],
)
def test_widths_that_do_not_fit_are_refused(layout: Layout, changes: dict[str, Any], message: str) -> None:
    assert message in refusal("fp8_block", layout=layout, **changes)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("precision", EIGHTS)
def test_a_model_that_fits_passes(precision: LearnerPrecision) -> None:
    require_fp8(precision, "transformer_engine", DENSE, Layout(tensor=2, sequence=True))
    if precision != "fp8_block":
        require_fp8(precision, "transformer_engine", replace(DENSE, hidden_size=192), Layout(tensor=2, sequence=True))


def found(installed: bool) -> Any:
    return lambda name: object() if installed and name == "transformer_engine" else None


@pytest.mark.parametrize(
    ("installed", "cuda", "dtype", "chosen"),
    [
        (True, True, torch.bfloat16, "transformer_engine"),
        (True, True, torch.float32, "megatron"),
        (True, False, torch.bfloat16, "megatron"),
        (False, True, torch.bfloat16, "megatron"),
    ],
)
def test_layers_by_default(
    monkeypatch: pytest.MonkeyPatch, installed: bool, cuda: bool, dtype: torch.dtype, chosen: str
) -> None:
    monkeypatch.setattr(build.importlib.util, "find_spec", found(installed))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert choose_layers(None, dtype) == chosen
    assert choose_layers("megatron", dtype) == "megatron"
