"""Check and type the settings of a recipe's section learner.megatron, which go to Megatron-Core's own classes.

    learner.megatron.transformer  ──▶ TransformerConfig                  owned names ──▶ RecipeError, anywhere
    learner.megatron.ddp          ──▶ DistributedDataParallelConfig      unknown names and wrong types ──▶ RecipeError,
    learner.megatron.optimizer    ──▶ OptimizerConfig                                     where Megatron is installed

A setting that the program computes from the rest of the recipe, from the model's config.json or from the machine would
be replaced silently, and planner, weight conversion and engines would go by the old value; so these are owned.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import EnumType
from fnmatch import fnmatchcase
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from pipeline.errors import RecipeError
from precision.text import did_you_mean, one_line, quoted

if TYPE_CHECKING:
    from pipeline.config.recipe import LearnerSection

NONE: Mapping[str, Any] = MappingProxyType({})
Part = Literal["transformer", "ddp", "optimizer"]

OWNED: dict[Part, dict[str, str]] = {
    "transformer": {
        "the model, as its config.json has it and engines serve it; train another model": """
            num_layers hidden_size num_attention_heads num_query_groups kv_channels ffn_hidden_size normalization
            layernorm_epsilon layernorm_zero_centered_gamma qk_layernorm qk_l2_norm qk_clip* add_bias_linear
            add_qkv_bias gated_linear_unit glu_linear_offset activation_func activation_func_clamp_value softmax_*
            window_* rotary_interleaved no_rope_freq mrope_section attention_output_gate multi_latent_attention
            experimental_attention_variant dsa_* linear_* mamba_* is_hybrid_model mtp_* heterogeneous_block_specs
            apply_residual_connection_post_layernorm num_moe_experts moe_router_topk* moe_ffn_hidden_size moe_layer_freq
            moe_router_pre_softmax moe_router_score_function moe_router_num_groups moe_router_group_topk
            moe_router_enable_expert_bias moe_router_bias_update_rate moe_shared_expert_* moe_latent_size
            moe_apply_probs_on_input""",
        "the policy that the reward alone moves; leave it out": """
            hidden_dropout attention_dropout moe_router_load_balancing_type moe_router_force_load_balancing
            moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps moe_token_drop* moe_expert_capacity_factor
            moe_pad_expert_input_to_capacity""",
        "learner.tensor_parallel": "tensor_model_parallel_size",
        "learner.sequence_parallel": "sequence_parallel",
        "learner.pipeline_parallel": "pipeline_model_parallel_size",
        "learner.virtual_pipeline": "virtual_pipeline_model_parallel_size",
        "learner.context_parallel": "context_parallel_size hierarchical_context_parallel_sizes hybrid_context_*",
        "learner.expert_parallel": "expert_model_parallel_size moe_extended_tp",
        "learner.expert_tensor_parallel": "expert_tensor_parallel_size",
        "num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage or the account_for_… settings, by which "
        "the planner counts layers too": "pipeline_model_parallel_layout",
        "learner.recompute": "recompute_granularity recompute_method moe_layer_recompute "
        "num_microbatches_with_partial_activation_checkpoints",
        "learner.precision": "params_dtype pipeline_dtype fp16 bf16 enable_autocast autocast_dtype fp8* fp4* *_bf16 "
        "fp32_residual_connection tp_only_amax_red quant_recipe use_kitchen* kitchen_*",
        "the way that pipeline stages exchange tensors, which the layout decides": """
            variable_seq_lengths overlap_p2p_comm batch_p2p_comm deallocate_pipeline_outputs max_seqlen_per_dp_cp_rank
            microbatch_group_size_per_vp_stage""",
        "the choice of layers, which precision and machine decide": "transformer_impl moe_grouped_gemm "
        "use_inference_optimized_layers inference_* flash_decode",
        "what the learner's own code is called for": """
            timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func init_method*
            output_layer_init_method embedding_init_method* perform_initialization
            use_cpu_initialization init_model_with_meta_device calculate_per_token_loss cross_entropy_*
            moe_enable_routing_replay moe_router_fusion overlap_moe_expert_parallel_comm ep_overlap_* test_mode
            _cpu_offloading_context""",
    },
    "ddp": {
        "learner.distributed_optimizer": "use_distributed_optimizer",
        "learner.overlap_grad_reduce": "overlap_grad_reduce",
        "learner.precision": "fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag keep_fp8_transpose_cache",
        "the sum of gradients, which the objective has divided by its tokens; leave it out": "average_in_collective "
        "gradient_reduce_div_fusion",
        "the groups and buffers that weights are read from; leave it out": """
            num_distributed_optimizer_instances align_param_gather use_megatron_fsdp use_custom_fsdp fsdp_*
            data_parallel_sharding_strategy outer_dp_sharding_strategy preserve_fp32_weights""",
    },
    "optimizer": {
        "learner.optimizer.lr": "lr decoupled_lr",
        "learner.optimizer.min_lr": "min_lr decoupled_min_lr",
        "learner.optimizer.weight_decay": "weight_decay decoupled_weight_decay",
        "learner.optimizer.betas": "adam_beta1 adam_beta2",
        "learner.optimizer.eps": "adam_eps",
        "learner.optimizer.clip_grad": "clip_grad",
        "learner.distributed_optimizer": "use_distributed_optimizer",
        "learner.precision": "fp8_recipe fp16 bf16 params_dtype reuse_grad_buf_* *loss_scale* hysteresis",
        "learner.megatron.ddp.overlap_param_gather": "overlap_param_gather",
        "AdamW, the one optimizer that is here; leave it out": "optimizer sgd_* muon_*",
        "the order of the learner's own steps; leave it out": "overlap_param_gather_with_optimizer_step timers",
    },
}
"""Part → what a setting would replace → its names; `*` stands for any characters."""


def check_owned(learner: LearnerSection) -> None:
    """Raise RecipeError for a setting that the program owns, or that contradicts another key. Loads no torch."""
    settings = learner.megatron
    for part, owned in OWNED.items():
        for name in getattr(settings, part):
            for replaced, names in owned.items():
                if any(fnmatchcase(name, pattern) for pattern in names.split()):
                    raise RecipeError(
                        f"learner.megatron.{part}.{one_line(name, 60)} would replace {replaced}"
                        + ("" if "; " in replaced else "; leave it out, and change that instead")
                    )
    transformer, ddp, optimizer = settings.transformer, settings.ddp, settings.optimizer
    for name, mode in (("recompute_modules", "selective"), ("recompute_num_layers", "full")):
        if name in transformer and learner.recompute != mode:
            raise RecipeError(
                f"learner.megatron.transformer.{name} belongs to learner.recompute {mode}, which is "
                f"{learner.recompute}; set that to {mode}, or leave it out"
            )
    if transformer.get("moe_token_dispatcher_type") == "allgather":
        raise RecipeError(
            "learner.megatron.transformer.moe_token_dispatcher_type is allgather, which needs micro-batches of one "
            "length on all data parallel ranks, and theirs differ; use alltoall or flex"
        )
    if optimizer.get("optimizer_cpu_offload") and not optimizer.get("use_precision_aware_optimizer"):
        raise RecipeError(
            "learner.megatron.optimizer.optimizer_cpu_offload needs use_precision_aware_optimizer: true beside it, "
            "without which Megatron-Core could not load a checkpoint; add it"
        )
    if ddp.get("overlap_param_gather") and not learner.distributed_optimizer:
        raise RecipeError(
            "learner.megatron.ddp.overlap_param_gather gathers what learner.distributed_optimizer has spread, which is "
            "false; set that to true, or leave it out"
        )


def check_settings(learner: LearnerSection) -> None:
    """Raise RecipeError for settings that the installed Megatron-Core does not take. Loads it if there are any."""
    for part in OWNED:
        settings_of(part, getattr(learner.megatron, part))
    if learner.megatron.optimizer.get("use_precision_aware_optimizer") and not find_spec("transformer_engine"):
        raise RecipeError(
            "learner.megatron.optimizer.use_precision_aware_optimizer needs Transformer Engine's AdamW, which is not "
            "installed; install it, or leave the setting out"
        )


def settings_of(part: Part, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings as the fields of Megatron-Core's class take them: a dtype or an enumeration's value in place
    of its name. Raises RecipeError for a name that is no field of the class, and for a value of another type."""
    if not given:
        return {}
    import torch

    kind = _class_of(part)
    hints = get_type_hints(kind)
    found = dict[str, Any]()
    for name, value in given.items():
        key = f"learner.megatron.{part}.{one_line(name, 60)}"
        if (hint := hints.get(name)) is None:
            raise RecipeError(f"unknown key {key}: Megatron-Core's {kind.__name__} has none{did_you_mean(name, hints)}")
        if isinstance(value, str):
            for one in get_args(hint) or (hint,):
                if one is torch.dtype and isinstance(getattr(torch, value, None), torch.dtype):
                    value = getattr(torch, value)
                elif isinstance(one, EnumType) and value in one.__members__:
                    value = one[value]
        try:
            strict = ConfigDict(arbitrary_types_allowed=True, strict=True)
            found[name] = TypeAdapter[Any](hint, config=strict).validate_python(value)
        except ValidationError:
            wanted = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
            names = f" ({', '.join(hint.__members__)})" if isinstance(hint, EnumType) else ""
            raise RecipeError(
                f"{key} is {quoted(given[name])}, expected {wanted}{names}, as Megatron-Core's {kind.__name__} says"
            ) from None
    return found


def megatron_config(part: Part, own: dict[str, Any], given: Mapping[str, Any]) -> Any:
    """Return Megatron-Core's class with the program's `own` values and the recipe's `given` settings over them. Raises
    RecipeError, with Megatron's reason, where they do not go together."""
    settings = settings_of(part, given)
    try:
        return _class_of(part)(**(own | settings))
    except (AssertionError, ValueError, RuntimeError) as error:
        if not settings:
            raise
        raise RecipeError(
            f"learner.megatron.{part} ({', '.join(settings)}) is refused by Megatron-Core: {one_line(error, 300)}"
        ) from error


def _class_of(part: Part) -> type[Any]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    found: type[Any] = dict(
        transformer=TransformerConfig, ddp=DistributedDataParallelConfig, optimizer=OptimizerConfig
    )[part]
    return found
