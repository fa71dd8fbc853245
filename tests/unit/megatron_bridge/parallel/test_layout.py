from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.parallel.layout import check_layout, check_longest_sample, layers_of_chunks, set_gpu_environment
from pipeline.config.recipe import LearnerSection
from pipeline.errors import LayoutError, ModelError

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 6,
    "hidden_size": 48,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 96,
    "vocab_size": 200,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
}

EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "intermediate_size": 97,  # unused, so that it may be anything
}


@pytest.mark.parametrize(
    ("tensor", "shared", "given", "expected"),
    [
        (1, False, {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        (1, True, {}, {}),
        (2, True, {}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        (2, False, dict(CUDA_DEVICE_MAX_CONNECTIONS="8", PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64"), {}),
        (1, False, dict(PYTORCH_ALLOC_CONF=""), {}),
    ],
)
def test_gpus_find_what_helps_them_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tensor: int, shared: bool, given: dict[str, str], expected: dict[str, str]
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    set_gpu_environment(LearnerSection(tensor_parallel=tensor), weights_shared=shared)
    assert os.environ == given | expected
    os.environ.pop("PYTORCH_ALLOC_CONF", None)
    graphs = dict(transformer=dict(cuda_graph_impl="local"))
    set_gpu_environment(LearnerSection.model_validate(dict(megatron=graphs)), weights_shared=shared)
    assert "PYTORCH_ALLOC_CONF" not in os.environ


BOTH_ENDS = dict(account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)


def test_sizes_that_divide_are_accepted() -> None:
    check_layout(QWEN3, LearnerSection(tensor_parallel=4, pipeline_parallel=3, data_parallel=5))
    check_layout(QWEN3, LearnerSection(pipeline_parallel=3, virtual_pipeline=2, context_parallel=7))
    spread = LearnerSection(tensor_parallel=2, sequence_parallel=True, data_parallel=3, expert_parallel=6)
    check_layout(QWEN3 | EXPERTS, spread)


@pytest.mark.parametrize(
    ("layers", "stages", "virtual", "settings", "expected"),
    [
        (6, 3, 1, {}, [[2], [2], [2]]),
        (8, 2, 2, {}, [[2, 2], [2, 2]]),
        (5, 2, 1, dict(num_layers_in_first_pipeline_stage=2), [[2], [3]]),
        (7, 3, 1, dict(num_layers_in_last_pipeline_stage=1), [[3], [3], [1]]),
        (7, 2, 1, dict(num_layers_in_first_pipeline_stage=3, num_layers_in_last_pipeline_stage=4), [[3], [4]]),
        (7, 2, 2, dict(account_for_embedding_in_pipeline_split=True), [[1, 2], [2, 2]]),
        (94, 4, 1, BOTH_ENDS, [[23], [24], [24], [23]]),
        (94, 8, 2, BOTH_ENDS, [[5, 6], *[[6, 6]] * 6, [6, 5]]),
        (6, 1, 1, dict(account_for_loss_in_pipeline_split=True), [[6]]),
    ],
)
def test_stages_of_different_sizes(
    layers: int, stages: int, virtual: int, settings: dict[str, Any], expected: list[list[int]]
) -> None:
    learner = LearnerSection(pipeline_parallel=stages, virtual_pipeline=virtual, megatron=dict(transformer=settings))
    assert layers_of_chunks(layers, learner) == expected


@pytest.mark.parametrize(
    ("layers", "stages", "virtual", "settings"),
    [
        (94, 4, 1, {}),
        (6, 4, 1, dict(num_layers_in_first_pipeline_stage=1)),
        (6, 3, 1, dict(num_layers_in_first_pipeline_stage=5)),
        (6, 2, 1, dict(num_layers_in_first_pipeline_stage=0)),
        (6, 2, 1, dict(num_layers_in_first_pipeline_stage=2, num_layers_in_last_pipeline_stage=3)),
        (6, 2, 2, dict(num_layers_in_first_pipeline_stage=3)),
        (6, 2, 1, dict(num_layers_in_first_pipeline_stage=2, account_for_loss_in_pipeline_split=True)),
        (6, 2, 1, dict(num_layers_in_first_pipeline_stage="two")),
        (6, 1, 1, dict(num_layers_in_first_pipeline_stage=6)),
    ],
)
def test_stages_that_do_not_add_up(layers: int, stages: int, virtual: int, settings: dict[str, Any]) -> None:
    learner = LearnerSection(pipeline_parallel=stages, virtual_pipeline=virtual, megatron=dict(transformer=settings))
    with pytest.raises(LayoutError, match=rf"is \d.* num_hidden_layers {layers}; use one of .* of different") as no:
        check_layout(QWEN3 | dict(num_hidden_layers=layers), learner)
    assert "\n" not in str(no.value)


def test_the_longest_sample_must_fit_with_its_padding() -> None:
    learner = LearnerSection(context_parallel=2, tensor_parallel=2, sequence_parallel=True, micro_batch_tokens=101)
    check_longest_sample(learner, 97)  # 96 tokens predict
    with pytest.raises(LayoutError, match=r"micro_batch_tokens is 101, .* takes 104 .* multiple of 8"):
        check_longest_sample(learner, 98)


@pytest.mark.parametrize(
    ("changes", "learner", "message"),
    [
        ({}, {"tensor_parallel": 5}, "tensor_parallel is 5, .* num_attention_heads 12; use one of 1, 2, 4"),
        ({}, {"tensor_parallel": 6}, "tensor_parallel is 6, .* num_key_value_heads 4"),
        ({"intermediate_size": 98}, {"tensor_parallel": 4}, "intermediate_size 98; use one of 1, 2"),
        ({}, {"pipeline_parallel": 4}, "pipeline_parallel is 4, .* num_hidden_layers 6; use one of 1, 2, 3, 6"),
        (
            {},
            {"pipeline_parallel": 2, "virtual_pipeline": 2},
            "pipeline_parallel × learner.virtual_pipeline is 4, .* num_hidden_layers 6",
        ),
        ({}, {"virtual_pipeline": 2}, "virtual_pipeline is 2, but learner.pipeline_parallel is 1"),
        ({}, {"expert_parallel": 2}, "is 2, but Qwen3ForCausalLM has no experts"),
        (EXPERTS, {"expert_parallel": 4, "data_parallel": 4}, "expert_parallel is 4, .* num_experts 6"),
        (EXPERTS, {"expert_tensor_parallel": 7, "data_parallel": 7}, "is 7, .* moe_intermediate_size 24"),
        (EXPERTS, {"expert_parallel": 3, "data_parallel": 2}, "is 3, which does not divide the 2 ranks of a pipeline"),
        (EXPERTS, {"tensor_parallel": 2}, "tensor_parallel is 2 with experts, which needs learner.sequence_parallel"),
    ],
)
def test_sizes_that_do_not_divide(changes: dict[str, Any], learner: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError, match=message) as caught:
        check_layout(QWEN3 | changes, LearnerSection(**learner))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported; use one of Qwen3ForCausalLM"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope scaling 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}}, "'llama3' with"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_models_that_cannot_be_reproduced_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_layout(QWEN3 | changes, LearnerSection())


def test_rope_of_old_and_new_configs() -> None:
    assert ModelConfig.from_hf(QWEN3).rope_theta == 1e6
    new = {key: value for key, value in QWEN3.items() if key != "rope_theta"}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    assert ModelConfig.from_hf(new).rope_theta == 5e5
    llama3 = {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    scaling = ModelConfig.from_hf(QWEN3 | {"rope_scaling": llama3}).rope_scaling
    assert scaling is not None
    assert scaling.factor == 32.0


def test_tensors_follow_the_architecture() -> None:
    qwen3 = ModelConfig.from_hf(QWEN3).tensors()
    assert qwen3["model.layers.5.self_attn.k_proj.weight"] == (32, 48)
    assert qwen3["model.layers.0.self_attn.q_norm.weight"] == (8,)
    assert "lm_head.weight" not in qwen3
    qwen2 = ModelConfig.from_hf(QWEN3 | {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False}).tensors()
    assert qwen2["model.layers.0.self_attn.q_proj.bias"] == (96,)
    assert qwen2["lm_head.weight"] == (200, 48)
    assert "model.layers.0.self_attn.q_norm.weight" not in qwen2


def test_checking_loads_neither_torch_nor_megatron() -> None:
    code = (
        "import sys; from megatron_bridge.parallel.layout import check_layout; "
        "assert not {'torch', 'megatron', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[4])
