"""What is read from config.json: sizes, the experts of a mixture, and the exact number of parameters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_bridge.hf.model_config import ARCHITECTURES, Experts, ModelConfig
from pipeline.errors import ModelError

MODELS = Path(__file__).parents[4] / "pipeline" / "recipes" / "models"
QWEN3_32B: dict[str, Any] = json.loads((MODELS / "qwen3-32b" / "config.json").read_text())
QWEN3_30B_A3B: dict[str, Any] = json.loads((MODELS / "qwen3-30b-a3b" / "config.json").read_text())


def test_parameters_are_counted_exactly() -> None:
    # The published sizes: 32.76 B and 30.53 B parameters.
    assert ModelConfig.from_hf(QWEN3_32B).num_parameters == 32_762_123_264
    assert ModelConfig.from_hf(QWEN3_30B_A3B).num_parameters == 30_532_122_624


def test_a_tied_embedding_counts_once() -> None:
    untied = ModelConfig.from_hf(QWEN3_32B).num_parameters
    tied = ModelConfig.from_hf(QWEN3_32B | dict(tie_word_embeddings=True)).num_parameters
    assert untied - tied == 151936 * 5120


def test_experts_are_read_and_their_tensors_listed() -> None:
    config = ModelConfig.from_hf(QWEN3_30B_A3B)
    assert config.experts == Experts(count=128, per_token=8, ffn_size=768, normalized=True)
    assert config.qk_norm
    assert not config.qkv_bias
    tensors = config.tensors()
    assert len(tensors) == 3 + 48 * (8 + 1 + 128 * 3)
    assert tensors["model.layers.47.mlp.gate.weight"] == (128, 2048)
    assert tensors["model.layers.0.mlp.experts.127.up_proj.weight"] == (768, 2048)
    assert tensors["model.layers.0.mlp.experts.0.down_proj.weight"] == (2048, 768)
    assert "model.layers.0.mlp.gate_proj.weight" not in tensors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(decoder_sparse_step=2), r"decoder_sparse_step is 2, but only 1 is supported"),
        (dict(mlp_only_layers=[0]), r"mlp_only_layers is \[0\], but only \[\] is supported"),
        (dict(num_experts=0), r"num_experts is 0, expected a whole number from 1 to 4096"),
        (dict(num_experts_per_tok=129), r"num_experts_per_tok is 129, expected at most num_experts 128"),
        (dict(moe_intermediate_size=None), r"moe_intermediate_size is None"),
        (dict(num_hidden_layers=10**25), r"num_hidden_layers is 1000.*, expected a whole number from 1 to 4096"),
        (dict(num_key_value_heads="8"), r"num_key_value_heads is '8', expected a whole number"),
        (dict(head_dim=True), r"head_dim is True, expected a whole number"),
        (dict(rms_norm_eps=[1]), r"rms_norm_eps is \[1\], expected a positive number"),
        (dict(rope_theta=float("nan")), r"rope_theta is nan, expected a positive number"),
        (dict(rope_scaling="llama3"), r"rope_scaling is 'llama3', expected an object"),
        (dict(rope_scaling=dict(rope_type=[1])), r"rope scaling \[1\] with .* is not supported"),
        (dict(architectures={"a": 1}), r"config\.json: architecture \(missing\) is not supported"),
        (dict(architectures=["x" * 5000]), r"architecture 'xxx.*\(5000 characters\) is not supported"),
        (dict(attention_bias=list(range(3000))), r"attention_bias is \[0, 1, 2, 3, 4, 5, \.\.\.\], but only False"),
        (
            dict(quantization_config={"quant_method": "fp8"}),
            r"quantization_config says 'fp8'.* give the bf16 folder .*rollout\.precision",
        ),
    ],
)
def test_what_cannot_be_reproduced_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as refused:
        ModelConfig.from_hf(QWEN3_30B_A3B | change)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "key", ["head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings"]
)
def test_a_key_that_is_left_out_is_what_transformers_takes(architecture: str, key: str) -> None:
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    kinds = dict(zip(ARCHITECTURES, (Qwen3Config, Qwen3MoeConfig, Qwen2Config, LlamaConfig), strict=True))
    sizes = dict(hidden_size=1024, intermediate_size=64, num_hidden_layers=1, num_attention_heads=32, vocab_size=16)
    sizes |= dict(max_position_embeddings=8, moe_intermediate_size=8, num_experts=2, num_experts_per_tok=1)
    more = dict(head_dim=16, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=5e5, tie_word_embeddings=True)
    given = sizes | {name: value for name, value in more.items() if name != key}
    ours = ModelConfig.from_hf(dict(given, architectures=[architecture]))
    theirs = kinds[architecture](**given)
    assert ours.num_kv_heads == (theirs.num_key_value_heads or theirs.num_attention_heads)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tied_embeddings == theirs.tie_word_embeddings


@pytest.mark.parametrize(("tensor", "rows"), [(1, 151_669), (2, 151_808), (4, 152_064), (8, 152_576)])
def test_a_vocabulary_is_padded_as_megatron_pads_it(tensor: int, rows: int) -> None:
    config = ModelConfig.from_hf(QWEN3_32B)
    assert replace(config, vocab_size=151_669).vocabulary_rows(tensor) == rows
    assert config.vocabulary_rows(tensor) == config.vocab_size == 151_936  # shared evenly: as it is
