"""What a model must divide by for a parallel layout, and a micro-batch must hold.

These checks read plain data only, so that a recipe can be refused before torch or Megatron are loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.model.te_precision import token_multiple
from megatron_bridge.parallel.layout import Layout
from pipeline.config.recipe import LearnerSection
from pipeline.errors import LayoutError


def check_layout(hf_config: Mapping[str, Any], learner: LearnerSection) -> None:
    """Raise LayoutError when the sizes do not divide the model, ModelError when the model is not supported.

    Loads neither torch nor Megatron.
    """
    config, layout = ModelConfig.from_hf(hf_config), Layout.of(learner)
    _check_tensor(config, layout)
    _check_pipeline(config, layout)
    _check_experts(config, layout)


def check_longest_sample(learner: LearnerSection, context_tokens: int) -> None:
    """Raise LayoutError when a sample of `context_tokens`, padded as the layout needs, exceeds a micro-batch."""
    layout = Layout.of(learner)
    rows = 2 * layout.context if layout.context > 1 else 1
    multiple = math.lcm(rows, layout.context * token_multiple(learner.precision)) * layout.sequence_ranks
    padded = -(-(context_tokens - 1) // multiple) * multiple
    if padded > learner.micro_batch_tokens:
        raise LayoutError(
            f"learner.micro_batch_tokens is {learner.micro_batch_tokens}, but the longest sample "
            f"(rollout.context_tokens {context_tokens}) takes {padded} when it is padded to a multiple of {multiple} "
            "for context and sequence parallelism and FP8; raise micro_batch_tokens"
        )


def _check_tensor(config: ModelConfig, layout: Layout) -> None:
    divided = {
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
    }
    if config.experts is None:
        divided["intermediate_size"] = config.ffn_size
    for name, size in divided.items():
        if size % layout.tensor:
            raise LayoutError(
                f"learner.tensor_parallel is {layout.tensor}, which does not divide the model's {name} {size}; "
                f"use one of {_divisors_of_all(list(divided.values()))}"
            )


def _check_pipeline(config: ModelConfig, layout: Layout) -> None:
    if layout.virtual > 1 and layout.pipeline == 1:
        raise LayoutError(
            f"learner.virtual_pipeline is {layout.virtual}, but learner.pipeline_parallel is 1: there are no stages to "
            "interleave; set virtual_pipeline to 1, or raise pipeline_parallel"
        )
    chunks, key = layout.pipeline * layout.virtual, "learner.pipeline_parallel"
    if layout.virtual > 1:
        key += " × learner.virtual_pipeline"
    if config.num_layers % chunks:
        raise LayoutError(
            f"{key} is {chunks}, which does not divide the model's num_hidden_layers {config.num_layers}; "
            f"use one of {_divisors_of_all([config.num_layers])}"
        )


def _check_experts(config: ModelConfig, layout: Layout) -> None:
    experts, spread = config.experts, layout.expert * layout.expert_tensor
    if experts is None:
        if spread > 1:
            raise LayoutError(
                f"learner.expert_parallel × expert_tensor_parallel is {spread}, but {config.architecture} has no "
                "experts; set both to 1"
            )
        return
    if experts.count % layout.expert:
        raise LayoutError(
            f"learner.expert_parallel is {layout.expert}, which does not divide the model's num_experts "
            f"{experts.count}; use one of {_divisors_of_all([experts.count])}"
        )
    if experts.ffn_size % layout.expert_tensor:
        raise LayoutError(
            f"learner.expert_tensor_parallel is {layout.expert_tensor}, which does not divide the model's "
            f"moe_intermediate_size {experts.ffn_size}; use one of {_divisors_of_all([experts.ffn_size])}"
        )
    ranks = layout.tensor * layout.context * layout.data
    if ranks % spread:
        raise LayoutError(
            f"learner.expert_parallel × expert_tensor_parallel is {spread}, which does not divide the {ranks} ranks of "
            "a pipeline stage (tensor × context × data); lower it, or raise learner.data_parallel"
        )
    if layout.tensor > 1 and not layout.sequence:
        raise LayoutError(
            f"learner.tensor_parallel is {layout.tensor} with experts, which needs learner.sequence_parallel: without "
            "it every tensor parallel rank would route every token; set it to true"
        )


def _divisors_of_all(sizes: list[int]) -> str:
    return ", ".join(str(n) for n in range(1, min(sizes) + 1) if all(size % n == 0 for size in sizes))
