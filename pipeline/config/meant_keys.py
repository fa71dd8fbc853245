"""Which recipe key was meant by one that there is not: misspelled, in the wrong section, of another choice, or another
trainer's word."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from pipeline.config.recipe import Recipe
from precision.text.near import near
from precision.text.short import quoted

ELSEWHERE = {
    "adam_beta1": "learner.optimizer.betas",
    "adam_beta2": "learner.optimizer.betas",
    "adam_epsilon": "learner.optimizer.eps",
    "adv_estimator": "advantage.name",
    "advantage_estimator": "advantage.name",
    "apply_chat_template": "task.chat_template",
    "apply_chat_template_kwargs": "task.template_arguments",
    "batch_size": "rollout.prompts_per_batch",
    "beta": "reference.coefficient",
    "bf16": "learner.precision",
    "chat_template_kwargs": "task.template_arguments",
    "clip_ratio": "objective.clip_low and objective.clip_high",
    "clip_ratio_c": "objective.dual_clip",
    "clip_ratio_high": "objective.clip_high",
    "clip_ratio_low": "objective.clip_low",
    "colocate": "weights.channel",
    "context_parallel_size": "learner.context_parallel",
    "custom_rm_path": "task.reward",
    "dataset_name": "task.path",
    "deepspeed": "learner.tensor_parallel and learner.data_parallel",
    "default_local_dir": "run.root",
    "dynamic_sampling_filter_path": "prompts.group_filter",
    "enable_gradient_checkpointing": "learner.recompute",
    "entropy_coef": "objective",
    "entropy_coeff": "objective",
    "eps_clip": "objective.clip_low and objective.clip_high",
    "eps_clip_c": "objective.dual_clip",
    "eps_clip_high": "objective.clip_high",
    "epsilon": "objective.clip_low and objective.clip_high",
    "epsilon_high": "objective.clip_high",
    "eval_interval": "evaluation.every",
    "eval_prompt_data": "task.held_out_path",
    "eval_steps": "evaluation.every",
    "eval_temperature": "evaluation.temperature",
    "experiment_name": "run.name",
    "expert_model_parallel_size": "learner.expert_parallel",
    "expert_tensor_parallel_size": "learner.expert_tensor_parallel",
    "filter_overlong_prompts": "rollout.context_tokens",
    "fsdp": "learner.tensor_parallel and learner.data_parallel",
    "generation_batch_size": "rollout.prompts_per_batch",
    "global_batch_size": "learner.updates_per_batch",
    "gpu_memory_utilization": "rollout.extra_args",
    "grad_clip": "learner.optimizer.clip_grad",
    "gradient_accumulation_steps": "learner.micro_batch_tokens",
    "gradient_checkpointing": "learner.recompute",
    "hf_checkpoint": "model.path",
    "importance_sampling_level": "objective.name",
    "input_key": "task.columns.prompt",
    "kl_loss_coef": "reference.coefficient",
    "kl_loss_type": "reference.estimator",
    "label_key": "task.columns.answer",
    "learning_rate": "learner.optimizer.lr",
    "logging_dir": "run.root",
    "loss_agg_mode": "advantage.aggregation",
    "loss_mode": "objective.name",
    "loss_type": "objective.name and advantage.aggregation",
    "lr_decay_style": "learner.optimizer.decay",
    "lr_scheduler_type": "learner.optimizer.decay",
    "lr_warmup_iters": "learner.optimizer.warmup_steps",
    "lr_warmup_steps": "learner.optimizer.warmup_steps",
    "mask_truncated_completions": "advantage.truncated",
    "max_actor_ckpt_to_keep": "checkpoint.keep",
    "max_completion_length": "rollout.max_new_tokens",
    "max_grad_norm": "learner.optimizer.clip_grad",
    "max_num_gen_batches": "prompts.max_refills",
    "max_prompt_length": "rollout.context_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "max_steps": "run.steps",
    "max_tokens": "rollout.max_new_tokens",
    "max_tokens_per_gpu": "learner.micro_batch_tokens",
    "model_name_or_path": "model.path",
    "n": "rollout.group_size",
    "n_gpus_per_node": "learner.data_parallel and rollout.engines",
    "n_samples_per_eval_prompt": "evaluation.samples",
    "n_samples_per_prompt": "rollout.group_size",
    "nnodes": "learner.data_parallel and rollout.engines",
    "norm_adv_by_std_in_grpo": "advantage.name",
    "num_epoch": "run.steps",
    "num_generations": "rollout.group_size",
    "num_iterations": "learner.updates_per_batch",
    "num_layers_per_virtual_pipeline_stage": "learner.virtual_pipeline",
    "num_rollout": "run.steps",
    "num_steps_per_rollout": "learner.updates_per_batch",
    "num_train_epochs": "run.steps",
    "opd_kl_coef": "distillation.coefficient",
    "output_dir": "run.root",
    "over_sampling_batch_size": "prompts.max_refills",
    "partial_rollout": "schedule.lag",
    "penalty_factor": "reward.overlong.penalty",
    "per_device_train_batch_size": "learner.micro_batch_tokens",
    "pipeline_model_parallel_size": "learner.pipeline_parallel",
    "ppo_epochs": "learner.updates_per_batch",
    "ppo_max_token_len_per_gpu": "learner.micro_batch_tokens",
    "ppo_micro_batch_size_per_gpu": "learner.micro_batch_tokens",
    "ppo_mini_batch_size": "learner.updates_per_batch",
    "prompt_data": "task.path",
    "prompt_key": "task.columns.prompt",
    "recompute_granularity": "learner.recompute",
    "ref_load": "reference.path",
    "reward_funcs": "task.reward",
    "reward_weights": "task.reward",
    "rm_type": "task.reward",
    "rm_url": "task.reward (a judge behind HTTP), or distillation.urls for a teacher",
    "rollout_batch_size": "rollout.prompts_per_batch",
    "rollout_is": "correction.name",
    "rollout_is_threshold": "correction.cap",
    "rollout_max_context_len": "rollout.context_tokens",
    "rollout_max_response_len": "rollout.max_new_tokens",
    "rollout_num_gpus": "rollout.engines",
    "rollout_num_gpus_per_engine": "rollout.tensor_parallel",
    "rollout_rs": "correction.name",
    "rollout_shuffle": "run.seed",
    "rollout_temperature": "rollout.temperature",
    "rollout_top_k": "rollout.top_k",
    "rollout_top_p": "rollout.top_p",
    "save_freq": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "scale_rewards": "advantage.name",
    "sglang_mem_fraction_static": "rollout.extra_args",
    "steps_per_generation": "learner.updates_per_batch",
    "tensor_model_parallel_size": "learner.tensor_parallel",
    "test_freq": "evaluation.every",
    "tis_clip": "correction.cap",
    "total_epochs": "run.steps",
    "total_training_steps": "run.steps",
    "train_batch_size": "rollout.prompts_per_batch",
    "train_files": "task.path",
    "update_weights_interval": "schedule.updates_per_stage",
    "use_kl_loss": "reference.coefficient",
    "use_opd": "distillation.coefficient",
    "use_rollout_routing_replay": "rollout.replay_experts",
    "use_tis": "correction.name",
    "use_unbiased_kl": "reference.estimator",
    "use_vllm": "rollout.engines",
    "val_files": "task.held_out_path",
    "vllm_gpu_memory_utilization": "rollout.extra_args",
    "vllm_importance_sampling_cap": "correction.cap",
    "vllm_importance_sampling_correction": "correction.name",
    "vllm_mode": "rollout.engines",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel",
    "warmup_ratio": "learner.optimizer.warmup_steps",
}
"""What TRL, verl and slime call it → where it is here; docs/from-trl.md and its sisters say what is different."""


IN_THEIR_SECTION = {
    "custom_reward_function.name": "task.reward",
    "custom_reward_function.path": "task.reward",
    "filter_groups.enable": "prompts.refill",
    "overlong_buffer.enable": "reward.overlong",
    "overlong_buffer.len": "reward.overlong.buffer_tokens",
    "val_kwargs.n": "evaluation.samples",
    "val_kwargs.temperature": "evaluation.temperature",
}
"""Likewise, for words that mean something only with the one before them."""

_EXPORT = "no key: `evenkeel export RUN --to wandb --follow` writes it offline, then `wandb sync` (docs/exporters.md)"
_BEFORE = "no key: the version before the first step is always evaluated, and the last one"
_MEASURE = (
    "no key: `evenkeel convert megatron-to-hf` makes a folder of a checkpoint, which an SGLang server serves to any "
    "benchmark (docs/model.md)"
)
NO_KEY = {
    "eval_on_start": _BEFORE,
    "logger": _EXPORT,
    "project_name": _EXPORT,
    "report_to": _EXPORT,
    "skip_eval_before_train": _BEFORE,
    "use_wandb": _EXPORT,
    "val_before_train": _BEFORE,
    "val_only": _MEASURE,
    "wandb_project": _EXPORT,
}
"""What others call what no key here says → what there is in its place."""
_EVERYWHERE = frozenset(("class", "name", "path"))
"""Keys of many sections: that one of them is called so says nothing about what was meant."""


def meant_by(unknown: str) -> str:
    """What is known about `section.key`: `did you mean run.steps?`, to which choice it belongs, or where keys are
    listed."""
    known, leaf = known_keys(), unknown.rpartition(".")[2]
    tail = ".".join(unknown.split(".")[-2:])
    if choices := known.get(unknown):
        section = unknown.partition(".")[0]
        return f"only {section} {', '.join(sorted(choices))} has it; choose that, or leave the key out"
    if unknown.partition(".")[0] == "extends":
        return "a recipe file extends another one, by its first line; give that file, or the other recipe itself"
    if keys := IN_THEIR_SECTION.get(tail) or ELSEWHERE.get(leaf) or (tail in known and unknown != tail and tail):
        return f"here it is {keys}"
    if leaf in NO_KEY:
        return NO_KEY[leaf]
    same = [] if leaf in _EVERYWHERE else sorted(key for key in known if key.rpartition(".")[2] == leaf)
    like = [key for key in near(unknown, known) if near(leaf, [key.rpartition(".")[2]])]
    if leaf in _EVERYWHERE:
        like = [key for key in like if near(unknown.rpartition(".")[0], [key.rpartition(".")[0]])]
    if found := same[:3] or like[:1]:
        return f"did you mean {' or '.join(found)}?"
    return "`evenkeel recipe --schema` lists the known ones"


def all_meant_by(unknown: str, value: object) -> list[str]:
    """`KEY; what is known about it`, of a key that there is not. A section of another trainer has no counterpart here,
    but its keys may have: of such a section that is said of each key that stands in it."""
    told = meant_by(unknown)
    misspelled = told.startswith("did you mean") and near(unknown, known_keys())
    if not isinstance(value, dict) or not value or misspelled:
        return [f"{unknown}; {told}"]
    return [line for key, below in value.items() for line in all_meant_by(f"{unknown}.{named(key)}", below)]


def named(part: object) -> str:
    """A key or an index, as a message names it: any text can be a key."""
    text = str(part)
    return text if text.isidentifier() and len(text) <= 60 else quoted(part)


@cache
def known_keys() -> dict[str, frozenset[str]]:
    """section.key → the choices that have it; none where it does not depend on one."""
    schema = Recipe.model_json_schema()
    found: dict[str, set[str]] = {}
    for key, choice in _keys(schema, schema["$defs"], "", ""):
        found.setdefault(key, set()).update([choice] if choice else [])
    return {key: frozenset(choices) for key, choices in found.items()}


def _keys(schema: dict[str, Any], definitions: dict[str, Any], prefix: str, choice: str) -> Iterator[tuple[str, str]]:
    if (reference := schema.get("$ref")) is not None:
        yield from _keys(definitions[reference.rpartition("/")[2]], definitions, prefix, choice)
    for way in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(way, ()):
            yield from _keys(one, definitions, prefix, choice)
    properties = schema.get("properties", {})
    for name in ("name", "kind"):
        choice = str(properties.get(name, {}).get("const", choice))
    for key, body in properties.items():
        path = f"{prefix}.{key}".lstrip(".")
        yield path, choice
        yield from _keys(body, definitions, path, choice)
