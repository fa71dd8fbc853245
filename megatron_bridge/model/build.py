"""Build Megatron-Core models from HF configs: one PolicyModel for each chunk of a process's pipeline stages.

Layers are Transformer Engine's (TE), or Megatron's own with torch's RMSNorm: see `choose_layers`. A recorded list of TE
layers' parameters is tested; their values have not yet been computed on a GPU.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.model.fp32_head import FP32OutputLayer
from megatron_bridge.model.logprobs import KeptRows, vocab_parallel_logprobs
from megatron_bridge.model.megatron_settings import NONE, megatron_config
from megatron_bridge.model.packed_attention import PackedAttention
from megatron_bridge.model.te_precision import BLOCK_MULTIPLE, GEMM_MULTIPLE, Layers, fp8_arguments, is_fp8
from megatron_bridge.parallel.layout import Layout
from pipeline.config.recipe import LearnerPrecision
from pipeline.errors import ModelError
from pipeline.importing import pip_install


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the constructor that Megatron-Core's layer specs call."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class TokenScores(NamedTuple):
    """Results for each label on the last stage, float32 [batch, sequence]."""

    logprobs: Tensor
    entropy: Tensor

    @property
    def device(self) -> torch.device:
        """The device, which Megatron's schedules read from the output of a mixture."""
        return self.logprobs.device


LOGITS_BYTES = 1 << 30
"""The most bytes of logits that exist at once in a pass that may compute them in pieces."""


class PolicyModel(GPTModel):  # type: ignore[misc]
    """A GPTModel whose last stage returns TokenScores for `labels`, from vocabulary-parallel logits in place.

    A scoring pass computes logits in pieces of LOGITS_BYTES. A training pass does so under full recomputation, and
    computes each piece again when it differentiates it: one long row then needs no more memory for logits than many
    short ones.
    """

    temperature: float = 1.0
    num_tokens: int
    """Size of the vocabulary without padding."""
    kept: KeptRows | None = None
    """The kept sets of the next micro-batch, one for each label; None: the whole vocabulary."""

    def _postprocess(self, *, hidden_states: Tensor, labels: Tensor | None = None, **given: Any) -> Any:
        """Return the stage's output, as GPTModel does; TokenScores of long micro-batches piece by piece."""
        whole = super()._postprocess
        trains = torch.is_grad_enabled()
        if not self.post_process or labels is None or (trains and self.config.recompute_granularity != "full"):
            return whole(hidden_states=hidden_states, labels=labels, **given)
        kept, length = self.kept, len(hidden_states)
        # Under sequence parallelism each rank has a part of the tokens, and a piece takes as many from each.
        ranks = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        element = 4 if isinstance(self.output_layer, FP32OutputLayer) else hidden_states.element_size()
        row_bytes = ranks * labels.shape[0] * self.output_layer.output_size_per_partition * element
        step = max(1, LOGITS_BYTES // row_bytes)
        if step >= length:
            return whole(hidden_states=hidden_states, labels=labels, **given)

        def score(hidden: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
            # Also called in the backward pass, when the next micro-batch may have come.
            before, self.kept = self.kept, None if kept is None else kept.of_rows(columns)
            try:
                return tuple(whole(hidden_states=hidden, labels=labels[:, columns], **given))
            finally:
                self.kept = before

        first = torch.arange(ranks, device=labels.device)[:, None] * length
        places = [
            first + torch.arange(at, min(at + step, length), device=labels.device) for at in range(0, length, step)
        ]
        pieces = [
            checkpoint(score, hidden, columns.flatten(), use_reentrant=False, preserve_rng_state=False)
            if trains
            else score(hidden, columns.flatten())
            for hidden, columns in zip(torch.split(hidden_states, step), places, strict=True)
        ]
        order = torch.cat([columns.flatten() for columns in places]).argsort()
        return TokenScores(*(torch.cat(each, dim=1)[:, order] for each in zip(*pieces, strict=True)))

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> TokenScores:
        """Return the scores of `labels` int64 [batch, sequence] from `logits` [sequence, batch, vocab/tp]. The backward
        pass overwrites `logits`; the forward pass overwrites padding of the vocabulary with -inf."""
        width, rank = logits.shape[-1], parallel_state.get_tensor_model_parallel_rank()
        if (here := max(0, self.num_tokens - rank * width)) < width:
            with torch.no_grad():  # the gradient of a padding logit is 0
                logits[..., here:] = -torch.inf
        logprobs, entropy = vocab_parallel_logprobs(
            logits,
            labels.transpose(0, 1).contiguous(),
            temperature=self.temperature,
            group=parallel_state.get_tensor_model_parallel_group(),
            overwrite_logits=True,
            kept=self.kept,
        )
        return TokenScores(logprobs.transpose(0, 1).contiguous(), entropy.transpose(0, 1).contiguous())


def choose_layers(layers: Layers | None, dtype: torch.dtype) -> Layers:
    """Return `layers`, or by default TE's if TE and CUDA are available and `dtype` is not float32: TE multiplies
    float32 in TF32, and its fused attention does not take it. Raises ModelError for TE's layers without TE."""
    installed = importlib.util.find_spec("transformer_engine") is not None
    if layers == "transformer_engine" and not installed:
        raise ModelError(
            "layers of Transformer Engine were asked for, but transformer_engine is not installed; "
            f"{pip_install('transformer-engine')}, or take Megatron's own"
        )
    if layers is not None:
        return layers
    fits = installed and torch.cuda.is_available() and dtype is not torch.float32
    return "transformer_engine" if fits else "megatron"


def build_chunks(
    model_config: ModelConfig,
    layout: Layout,
    dtype: torch.dtype,
    temperature: float,
    *,
    recompute: Literal["none", "selective", "full"] = "none",
    fp32_lm_head: bool = False,
    layers: Layers | None = None,
    precision: LearnerPrecision | None = None,
    settings: Mapping[str, Any] = NONE,
) -> list[PolicyModel]:
    """Build this rank's model chunks, one for each virtual pipeline stage, randomly initialized. Megatron's parallel
    state must match `layout`. `temperature` divides the logits. `layers` is as in `choose_layers`; `precision` matters
    only for FP8, which needs bfloat16 as `dtype`. `settings` are those of learner.megatron.transformer. Raises
    ModelError for what cannot be built here, and RecipeError for settings that Megatron refuses."""
    layers = choose_layers(layers, dtype)
    if precision is not None and is_fp8(precision):
        require_fp8(precision, layers, model_config, layout)
    config = transformer_config(
        model_config, layout, dtype, recompute, layers=layers, precision=precision, settings=settings
    )
    if config.cuda_graph_impl != "none":
        require_graphs(config)
        # Graphs register generators. No number depends on the seed: weights are loaded, and nothing is dropped.
        tensor_parallel.model_parallel_cuda_manual_seed(0, use_cudagraphable_rng=True, force_reset_rng=True)
    if not hasattr(moe_utils, "te_general_gemm"):
        # Megatron-Core 0.16.1's router compares TE's matrix product with None, but defines the name only with TE.
        moe_utils.te_general_gemm = None
    chunks = [_chunk(model_config, config, stage if layout.virtual > 1 else None) for stage in range(layout.virtual)]
    for chunk in chunks:
        chunk.temperature, chunk.num_tokens = temperature, model_config.vocab_size
        for name, parameter in chunk.named_parameters():
            # Megatron-Core 0.16.1 reduces experts' gradients over their own replicas only under expert parallelism.
            # With one expert parallel rank and whole experts (expert tensor parallel 1) under tensor parallelism, it
            # would silently leave out the tensor parallel ranks, each of which has seen other tokens.
            if ".mlp.experts." in name:
                parameter.allreduce = False  # not over the ranks that reduce all other gradients
        if fp32_lm_head and chunk.post_process and dtype is not torch.float32:
            chunk.output_layer.__class__ = FP32OutputLayer
        if torch.cuda.is_available():
            chunk.cuda(torch.cuda.current_device())
    return chunks


def _chunk(model_config: ModelConfig, config: TransformerConfig, virtual_stage: int | None) -> PolicyModel:
    rope = (
        {}
        if model_config.rope_scaling is None
        else {"rope_scaling": True, "rope_scaling_factor": model_config.rope_scaling.factor}
    )
    return PolicyModel(
        config=config,
        transformer_layer_spec=_block_spec(config, model_config, virtual_stage),
        vocab_size=model_config.vocabulary_rows(config.tensor_model_parallel_size),
        max_sequence_length=model_config.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=model_config.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=model_config.rope_theta,
        vp_stage=virtual_stage,
        **rope,
    )


def transformer_config(
    model_config: ModelConfig,
    layout: Layout,
    dtype: torch.dtype,
    recompute: Literal["none", "selective", "full"] = "none",
    *,
    layers: Layers = "megatron",
    precision: LearnerPrecision | None = None,
    settings: Mapping[str, Any] = NONE,
) -> TransformerConfig:
    on_gpu, interleaved = torch.cuda.is_available(), layout.virtual > 1
    recomputed: dict[str, Any] = {}
    if recompute == "selective":
        # Attention without stored scores has nothing to save; the MLP holds most of a layer.
        modules = ["mlp" if model_config.experts is None else "moe"]
        recomputed = {"recompute_granularity": "selective", "recompute_modules": modules}
    elif recompute == "full":
        recomputed = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    experts: dict[str, Any] = {}
    if model_config.experts is not None:
        experts = {
            "num_moe_experts": model_config.experts.count,
            "moe_router_topk": model_config.experts.per_token,
            "moe_ffn_hidden_size": model_config.experts.ffn_size,
            # A softmax over all experts whose best weights are then normalized equals a softmax over the best.
            "moe_router_pre_softmax": not model_config.experts.normalized,
            "moe_router_dtype": "fp32",
            # No load balancing: nothing but the reward moves the policy.
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            # Routers ask megatron_bridge.step.expert_replay, which Megatron's fused router would not.
            "moe_enable_routing_replay": True,
            "moe_router_fusion": False,
            "moe_permute_fusion": on_gpu and layers == "transformer_engine",
        }
    own = dict[str, Any](
        num_layers=model_config.num_layers,
        hidden_size=model_config.hidden_size,
        num_attention_heads=model_config.num_heads,
        num_query_groups=model_config.num_kv_heads,
        kv_channels=model_config.head_dim,
        ffn_hidden_size=model_config.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=model_config.norm_eps,
        qk_layernorm=model_config.qk_norm,
        add_qkv_bias=model_config.qkv_bias,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Data parallel ranks differ in the lengths of their micro-batches, which the default dispatcher cannot take.
        moe_token_dispatcher_type="alltoall",
        **experts,
        **fp8_arguments(precision),
        transformer_impl="transformer_engine" if layers == "transformer_engine" else "local",
        moe_grouped_gemm=model_config.experts is not None and layers == "transformer_engine",
        **recomputed,
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.sequence,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if interleaved else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        # gloo sends asynchronously from memory that deallocation would free. With virtual stages the loss is then
        # silently wrong, and gloo also mixes up batched sends of different chunks.
        deallocate_pipeline_outputs=on_gpu,
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        batch_p2p_sync=False,  # it would wait for the whole device, and so for a broadcast of weights under way
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        attention_softmax_in_fp32=True,
        # The objective divides by the tokens of the whole step, so gradients are summed, never averaged.
        calculate_per_token_loss=True,
        # False would omit the parameters' tensor parallel attributes.
        perform_initialization=True,
        use_cpu_initialization=not on_gpu,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        apply_rope_fusion=on_gpu and layers == "transformer_engine",
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,  # of Megatron's own linears, by a kernel of Apex; see wrap_and_optimize
        cross_entropy_loss_fusion=False,
        barrier_with_L1_time=False,
        cuda_graph_scope=[],  # the default warns that it is deprecated
    )
    found: TransformerConfig = megatron_config("transformer", own, settings)
    return found


def _block_spec(config: TransformerConfig, model_config: ModelConfig, virtual_stage: int | None) -> ModuleSpec:
    experts = None if model_config.experts is None else model_config.experts.count
    if config.transformer_impl == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=experts is not None, qk_layernorm=model_config.qk_norm
        )
    layer = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=model_config.qk_norm, normalization="RMSNorm")
    modules = layer.submodules
    modules.input_layernorm = modules.pre_mlp_layernorm = RMSNorm
    attention = modules.self_attention.submodules
    if model_config.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    attention.core_attention = PackedAttention
    num_layers = get_num_layers_to_build(config, vp_stage=virtual_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)


def require_graphs(config: TransformerConfig) -> None:
    """Raise ModelError unless whole layers can be captured as CUDA graphs by Megatron. A graph repeats its kernels on
    the same shapes and addresses, so everything that a layer decides on the host must be alike in all micro-batches;
    `Split.row_slots` makes their rows so."""
    if config.cuda_graph_impl != "local":
        found = "only Megatron's own capture is called here; set cuda_graph_impl to local"
    elif config.cuda_graph_scope:
        found = "only whole layers are captured; leave cuda_graph_scope out"
    elif config.transformer_impl != "transformer_engine":
        found = "Megatron's own layers read the rows' lengths on the host; use Transformer Engine's layers on a GPU"
    elif config.num_moe_experts is not None:
        found = "experts get other numbers of tokens in each micro-batch; leave it out for a mixture"
    elif config.pipeline_model_parallel_size > 1:
        found = "a stage would need a graph for each of its micro-batches; set learner.pipeline_parallel to 1"
    elif config.fp8_recipe == "delayed" and config.fp8 is not None:
        found = "scoring would replay training's graph, which changes the scales; use fp8_tensor or fp8_block"
    elif "expandable" in os.environ.get("PYTORCH_ALLOC_CONF", "") and os.environ.get("NCCL_GRAPH_REGISTER") != "0":
        found = "NCCL would register memory that grows for its graphs; set NCCL_GRAPH_REGISTER=0 for the learner"
    else:
        return
    raise ModelError(f"learner.megatron.transformer.cuda_graph_impl is {config.cuda_graph_impl}, but {found}")


def require_fp8(precision: LearnerPrecision, layers: Layers, config: ModelConfig, layout: Layout) -> None:
    """Raise ModelError if this process cannot train this model in FP8."""
    wanted = (9, 0) if precision == "fp8_block" else (8, 9)
    if not torch.cuda.is_available():
        found = "there is no CUDA device"
    elif layers != "transformer_engine":
        found = "the layers are Megatron's own"
    elif torch.cuda.get_device_capability() < wanted:
        found = f"the GPU has compute capability {'.'.join(map(str, torch.cuda.get_device_capability()))}"
    else:
        rows = config.qkv_rows
        sizes = {
            "hidden_size": config.hidden_size,
            "query width / tensor_parallel": rows[0] // layout.tensor,
            "query, key and value width / tensor_parallel": sum(rows) // layout.tensor,
        }
        if config.experts is None:
            sizes["intermediate_size / tensor_parallel"] = config.ffn_size // layout.tensor
        else:
            sizes["moe_intermediate_size / expert_tensor_parallel"] = config.experts.ffn_size // layout.expert_tensor
        for name, size in sizes.items():
            blocks = precision == "fp8_block" and layout.sequence and name == "hidden_size"
            multiple = BLOCK_MULTIPLE if blocks else GEMM_MULTIPLE
            if size % multiple:
                raise ModelError(
                    f"learner.precision is {precision}, but the model's {name} is {size}, not a multiple of "
                    f"{multiple}; use bf16, or smaller parallel sizes"
                )
        return
    raise ModelError(
        f"learner.precision is {precision}, which needs Transformer Engine layers on a GPU of compute capability "
        f"{'.'.join(map(str, wanted))} or more, but {found}; use such a machine with Transformer Engine, or bf16, "
        "with learner.fp8_emulation=true to train under the rollout's FP8 all the same"
    )
