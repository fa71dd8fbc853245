"""HF folder → Megatron-Core model: one PolicyModel per process (its pipeline stage).

With CUDA and Transformer Engine the layers are TE's; otherwise they are Megatron's own, with torch's RMSNorm. No test
runs the TE path.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_bridge.shape import ModelShape
from megatron_bridge.vocab_parallel import vocab_parallel_logprobs


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm under the constructor that Megatron-Core's layer specs call."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class PolicyModel(GPTModel):  # type: ignore[misc]
    """A GPTModel whose last stage answers `labels` with (log-probabilities, entropies), each float32 [batch, sequence].

    Computed from the vocabulary-parallel logits where they are, so that no full-precision copy of them ever exists.
    """

    temperature: float = 1.0

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """`labels` int64 [batch, sequence]; `logits` [sequence, batch, vocab/tp], overwritten by the backward pass."""
        logprobs, entropy = vocab_parallel_logprobs(
            logits,
            labels.transpose(0, 1).contiguous(),
            temperature=self.temperature,
            group=parallel_state.get_tensor_model_parallel_group(),
            overwrite_logits=True,
        )
        return logprobs.transpose(0, 1).contiguous(), entropy.transpose(0, 1).contiguous()


def uses_transformer_engine() -> bool:
    """Whether layers are built from Transformer Engine."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def build_chunks(shape: ModelShape, dtype: torch.dtype, temperature: float) -> list[PolicyModel]:
    """The model chunks of this rank (one: virtual pipelining is not used), randomly initialised.

    Megatron's parallel state must exist. `temperature` divides the logits before log-probabilities are taken.
    """
    config = transformer_config(shape, dtype)
    rope = (
        {} if shape.rope_scaling is None else {"rope_scaling": True, "rope_scaling_factor": shape.rope_scaling.factor}
    )
    model = PolicyModel(
        config=config,
        transformer_layer_spec=_block_spec(config, shape),
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        **rope,
    )
    model.temperature = temperature
    if torch.cuda.is_available():
        model.cuda(torch.cuda.current_device())
    return [model]


def transformer_config(shape: ModelShape, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's configuration of this architecture, for the parallel state as it is."""
    on_gpu = torch.cuda.is_available()
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.qk_norm,
        add_qkv_bias=shape.qkv_bias,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        # The objective divides by the tokens of the whole step, so gradients are summed, never averaged.
        calculate_per_token_loss=True,
        # Micro-batches differ in length; Megatron allows that with this dispatcher only, dense models included.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # False would leave parameters without their tensor parallel attributes.
        perform_initialization=True,
        use_cpu_initialization=not on_gpu,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        apply_rope_fusion=on_gpu and uses_transformer_engine(),
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        cross_entropy_loss_fusion=False,
        barrier_with_L1_time=False,
        # gloo sends asynchronously from memory that deallocation would free under it.
        deallocate_pipeline_outputs=on_gpu,
        batch_p2p_comm=True,
        batch_p2p_sync=on_gpu,
    )


def _block_spec(config: TransformerConfig, shape: ModelShape) -> ModuleSpec:
    if uses_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=shape.qk_norm)
    layer = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    modules = layer.submodules
    modules.input_layernorm = modules.pre_mlp_layernorm = RMSNorm
    if shape.qk_norm:
        modules.self_attention.submodules.q_layernorm = RMSNorm
        modules.self_attention.submodules.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)
