"""The name map: slices by hand, what mbridge made of the same tensors, the bijection at the size of real models."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from launch.verify.layouts import write_model
from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.parallel.layout import check_layout
from megatron_bridge.weights import NameMap, ShardCoords, TensorSlice
from pipeline.config.recipe import LearnerSection
from pipeline.errors import LayoutError
from precision.supervised import Supervised
from tests.support.learners import learner_here
from tests.support.parameters import RankParameters, build, check_bijection
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[3]

MODELS = ROOT / "pipeline" / "recipes" / "models"
QWEN3_32B: dict[str, Any] = json.loads((MODELS / "qwen3-32b" / "config.json").read_text())
QWEN25_32B = QWEN3_32B | dict(
    architectures=["Qwen2ForCausalLM"], intermediate_size=27648, num_attention_heads=40, vocab_size=152064
)
QWEN3_30B_A3B: dict[str, Any] = json.loads((MODELS / "qwen3-30b-a3b" / "config.json").read_text())
TINY = dict(
    hidden_size=6,
    intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=2,
    vocab_size=12,
    max_position_embeddings=8,
)
TINY_BIASED = ModelConfig.from_hf(TINY | dict(architectures=["Qwen2ForCausalLM"]))
TINY_EXPERTS = ModelConfig.from_hf(
    TINY | dict(architectures=["Qwen3MoeForCausalLM"], num_experts=4, num_experts_per_tok=2, moe_intermediate_size=4)
)

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen3-32B TP8": (QWEN3_32B, dict(tensor=8)),
    "Qwen3-32B TP4 PP4": (QWEN3_32B, dict(tensor=4, pipeline=4)),
    "Qwen3-32B TP8 PP2": (QWEN3_32B, dict(tensor=8, pipeline=2)),
    "Qwen3-32B tied TP4 PP4 VPP2": (QWEN3_32B | dict(tie_word_embeddings=True), dict(tensor=4, pipeline=4, virtual=2)),
    "94 layers PP8": (
        QWEN3_32B | dict(num_hidden_layers=94),
        dict(
            pipeline=8,
            settings=dict(account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True),
        ),
    ),
    "Qwen2.5-32B TP8": (QWEN25_32B, dict(tensor=8)),
    "Qwen2.5-32B TP4 PP4": (QWEN25_32B, dict(tensor=4, pipeline=4)),
    "Qwen2.5-32B TP8 PP2": (QWEN25_32B, dict(tensor=8, pipeline=2)),
    "Qwen3-30B-A3B TP4 PP4 EP4": (QWEN3_30B_A3B, dict(tensor=4, pipeline=4, expert=4, sequence=True)),
    "Qwen3-30B-A3B TP4 EP8": (QWEN3_30B_A3B, dict(tensor=4, data=2, expert=8, sequence=True)),
}
LIKE_OTHERS = (
    "Qwen3-32B TP4 PP4",
    "Qwen3-32B TP8 PP2",
    "Qwen2.5-32B TP4 PP4",
    "Qwen2.5-32B TP8 PP2",
    "Qwen3-30B-A3B TP4 PP4 EP4",
)
"""Cases whose layout or model another case has; `make test-slow` runs them."""
BILLIONS = {"Qwen3-32B": 32_762_123_264, "Qwen2.5-32B": 32_763_876_352, "Qwen3-30B-A3B": 30_532_122_624}


class Built(dict[str, list[RankParameters]]):
    """case → what real Megatron models of every rank hold, built without memory when first asked for."""

    def __missing__(self, case: str) -> list[RankParameters]:
        [[self[case]]] = run_ranks(1, build, [CASES[case]])
        return self[case]


@pytest.fixture(scope="module")
def built() -> Built:
    return Built()


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in LIKE_OTHERS else []) for case in CASES]
)
def test_real_models_hold_every_number_exactly_once(built: Built, case: str) -> None:
    config = ModelConfig.from_hf(CASES[case][0])
    sizes = CASES[case][1]
    assert len(built[case]) == sizes.get("tensor", 1) * sizes.get("pipeline", 1) * sizes.get("data", 1)
    counted = check_bijection(config, built[case])
    assert counted == config.num_parameters
    if "tied" not in case and "layers" not in case:
        assert counted == BILLIONS[case.split(" ")[0]]


@pytest.mark.parametrize("case", ["Qwen3-32B TP8", "Qwen3-30B-A3B TP4 EP8"])
def test_names_of_transformer_engine_layers_are_a_bijection_too(built: Built, case: str) -> None:
    norm = ".mlp.linear_fc1.layer_norm_weight" if "A3B" not in case else ".pre_mlp_layernorm.weight"

    def of_te(name: str) -> str:
        fused = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
        return fused.replace(".pre_mlp_layernorm.weight", norm)

    ranks = [replace(rank, sizes={of_te(name): size for name, size in rank.sizes.items()}) for rank in built[case]]
    check_bijection(ModelConfig.from_hf(CASES[case][0]), ranks)


def test_tensor_parallel_8_does_not_divide_4_key_value_heads() -> None:
    with pytest.raises(LayoutError, match="num_key_value_heads 4"):
        check_layout(QWEN3_30B_A3B, LearnerSection(tensor_parallel=8, sequence_parallel=True))


Sizes = dict[str, tuple[int, ...]]


LAYER = "decoder.layers.3."


def test_pieces_by_hand() -> None:
    names = NameMap(TINY_BIASED)
    second = ShardCoords(tensor_rank=1, tensor_size=2)
    qkv = "model.layers.1.self_attn."
    # 2 key/value heads of size 2, each with 2 query heads: rank 1 has the second group.
    assert names.slices("decoder.layers.1.self_attention.linear_qkv.weight", second) == (
        TensorSlice(qkv + "q_proj.weight", (4, 8), (0, 6)),
        TensorSlice(qkv + "k_proj.weight", (2, 4), (0, 6)),
        TensorSlice(qkv + "v_proj.weight", (2, 4), (0, 6)),
    )
    assert names.slices("decoder.layers.1.self_attention.linear_qkv.bias", ShardCoords()) == (
        TensorSlice(qkv + "q_proj.bias", (0, 4), None),
        TensorSlice(qkv + "k_proj.bias", (0, 2), None),
        TensorSlice(qkv + "v_proj.bias", (0, 2), None),
        TensorSlice(qkv + "q_proj.bias", (4, 8), None),
        TensorSlice(qkv + "k_proj.bias", (2, 4), None),
        TensorSlice(qkv + "v_proj.bias", (2, 4), None),
    )
    assert names.slices("decoder.layers.0.mlp.linear_fc2.weight", second) == (
        TensorSlice("model.layers.0.mlp.down_proj.weight", (0, 6), (4, 8)),
    )
    assert names.size("decoder.layers.0.mlp.linear_fc1.weight", second) == (8, 6)


def test_experts_are_counted_from_the_ranks_first_and_cut_by_expert_tensor_ranks() -> None:
    names = NameMap(TINY_EXPERTS)
    local = names.stage_name("decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight", [1])
    grouped = names.stage_name("decoder.layers.0.mlp.experts.linear_fc1.weight1", [1])
    assert local == grouped == "decoder.layers.1.mlp.experts.linear_fc1.weight1"
    coords = ShardCoords(tensor_rank=1, tensor_size=2, expert_rank=1, expert_size=2, expert_tensor_size=2)
    assert names.slices(local, coords) == (
        TensorSlice("model.layers.1.mlp.experts.3.gate_proj.weight", (0, 2), (0, 6)),
        TensorSlice("model.layers.1.mlp.experts.3.up_proj.weight", (0, 2), (0, 6)),
    )
    assert names.slices("decoder.layers.1.mlp.router.weight", coords) == (
        TensorSlice("model.layers.1.mlp.gate.weight", (0, 4), (0, 6)),
    )


AS_MBRIDGE_HAS_IT = {
    "Qwen3ForCausalLM": "3f1c6946fc43bcae",
    "Qwen3MoeForCausalLM": "f719f6be7d18bbb9",
    "Qwen2ForCausalLM": "5c55095c9c01f2ce",
    "LlamaForCausalLM": "dbdbe1155de2c31b",
}
"""What mbridge 0.15.1 made of the same tensors, recorded once: SHA-256 of the shards of two tensor parallel ranks."""


@pytest.mark.parametrize("architecture", AS_MBRIDGE_HAS_IT)
def test_every_rank_gets_what_mbridge_would_load(architecture: str) -> None:
    sizes = dict(num_hidden_layers=2, hidden_size=8, num_attention_heads=4, num_key_value_heads=2, head_dim=4)
    sizes |= dict(intermediate_size=12, vocab_size=10, max_position_embeddings=64)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6)
    config = ModelConfig.from_hf(dict(architectures=[architecture], **sizes, **experts))
    tensors, first = dict[str, Tensor](), 0
    for name, size in config.tensors().items():
        tensors[name] = torch.arange(first, first + math.prod(size), dtype=torch.float32).view(size)
        first += math.prod(size)
    layer = ["linear_qkv.layer_norm_weight", "linear_qkv.weight", "linear_proj.weight"]
    layer += ["linear_qkv.bias"] * config.qkv_bias + ["q_layernorm.weight", "k_layernorm.weight"] * config.qk_norm
    mlp = ["linear_fc1.layer_norm_weight", "linear_fc1.weight", "linear_fc2.weight"]
    if config.experts:
        mlp = ["router.weight", *(f"experts.linear_fc{n}.weight{e}" for n in (1, 2) for e in range(4))]
    parts = [f"self_attention.{part}" for part in layer] + ["pre_mlp_layernorm.weight"] * bool(config.experts)
    parts += [f"mlp.{part}" for part in mlp]
    stage = ["embedding.word_embeddings.weight", *(f"decoder.layers.{n}.{part}" for n in (0, 1) for part in parts)]
    names, digest = NameMap(config), hashlib.sha256()
    for name in [*stage, "decoder.final_layernorm.weight", "output_layer.weight"]:
        for rank in range(2):
            coords = ShardCoords(tensor_rank=rank, tensor_size=2, expert_tensor_rank=rank, expert_tensor_size=2)
            digest.update(torch.cat([tensors[s.name][s.index] for s in names.slices(name, coords)]).numpy().tobytes())
    assert digest.hexdigest()[:16] == AS_MBRIDGE_HAS_IT[architecture]


def exported(model: Path) -> dict[str, str]:
    learner = LearnerSection(precision="fp32", tensor_parallel=2, pipeline_parallel=2, step_deadline_s=60)
    with learner_here(model, learner, Supervised(), temperature=1.0, seed=0, total_steps=1) as created:
        return {
            name: hashlib.sha256(tensor.contiguous().numpy()).hexdigest() for name, tensor in created.named_weights()
        }


def test_what_ranks_gather_is_what_they_loaded(tmp_path: Path) -> None:
    """TP2 × PP2, with a vocabulary that is padded on the last rank."""
    write_model(tmp_path / "model", experts=False)
    stored = load_file(tmp_path / "model" / "model.safetensors")
    expected = {name: hashlib.sha256(tensor.float().numpy()).hexdigest() for name, tensor in stored.items()}
    for found in run_ranks(4, exported, tmp_path / "model"):
        assert found == expected
