"""Which recipe key was meant by one that there is not: misspelled, in the wrong section, of another choice, or another
trainer's word, of something that is called otherwise here or is not here."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from typing import Any

from pipeline.config.recipe import Recipe
from precision.text import quoted

_WORDS = """
advantage.aggregation: loss_agg_mode
advantage.name: adv_estimator advantage.estimator advantage_estimator norm_adv_by_std_in_grpo scale_rewards
advantage.truncated: mask_truncated_completions overlong_filtering
checkpoint.every: checkpoint.interval save_freq save_interval save_period save_steps
checkpoint.keep: keep_top_k max_actor_ckpt_to_keep max_ckpt_num max_num save_total_limit
correction.cap: is_correction_threshold rollout_is_threshold tis_clip truncated_importance_sampling_ratio
correction.cap: vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_is_truncated_threshold
correction.name: enable_vllm_is_correction is_correction_type rollout_is rollout_rs
correction.name: use_importance_sampling_correction use_tis vllm_importance_sampling_correction
distillation.coefficient: opd_kl_coef use_opd
evaluation.every: eval_interval eval_steps evaluation.interval evaluation.steps test_freq val_period
evaluation.prompts: evaluation.num_examples max_val_samples
evaluation.samples: evaluation.n evaluation.n_samples_per_prompt n_samples_per_eval_prompt num_generations_eval
evaluation.samples: val_num_generations_per_prompt
evaluation.temperature: eval_temperature val_temperature
learner.context_parallel: context_parallel_size ring_attn_size
learner.distributed_optimizer: use_distributed_optimizer
learner.expert_parallel: expert_model_parallel_size expert_parallel_size
learner.expert_tensor_parallel: expert_tensor_parallel_size
learner.micro_batch_tokens: gradient_accumulation_steps max_tokens_per_gpu micro_train_batch_size
learner.micro_batch_tokens: per_device_train_batch_size ppo_max_token_len_per_gpu ppo_micro_batch_size_per_gpu
learner.micro_batch_tokens: train_max_tokens_per_gpu train_mb_tokens train_micro_batch_size
learner.optimizer.betas: adam_beta1 adam_beta2
learner.optimizer.clip_grad: grad_clip max_grad_norm max_norm
learner.optimizer.decay: lr_decay_style lr_scheduler_type
learner.optimizer.decay_steps: lr_decay_iters lr_decay_steps
learner.optimizer.eps: adam_eps adam_epsilon
learner.optimizer.lr: learning_rate
learner.optimizer.warmup_steps: lr_warmup_iters lr_warmup_ratio lr_warmup_steps lr_warmup_steps_ratio warmup_ratio
learner.pipeline_parallel: pipeline_model_parallel_size pipeline_parallel_size
learner.precision: bf16
learner.recompute: activation_checkpointing enable_gradient_checkpointing gradient_checkpointing
learner.recompute: gradient_checkpointing_enable recompute_granularity
learner.tensor_parallel: tensor_model_parallel_size tensor_parallel_size
learner.updates_per_batch: global_batch_size max_epochs num_iterations num_steps_per_rollout ppo_epochs
learner.updates_per_batch: ppo_mini_batch_size steps_per_generation train_global_batch_size
learner.virtual_pipeline: num_layers_per_virtual_pipeline_stage
model.fp32_lm_head: cast_lm_head_to_fp32
model.path: hf_checkpoint model_name model_name_or_path pretrain
objective.clip_high: clip_ratio_high eps_clip_high epsilon_high ratio_clip_max
objective.clip_low: clip_ratio_low ratio_clip_min
objective.clip_low and objective.clip_high: clip_ratio eps_clip eps_clip_low_high epsilon
objective.dual_clip: clip_ratio_c eps_clip_c ratio_clip_c
objective.name: importance_sampling_level loss_mode policy_loss_type
objective.name and advantage.aggregation: loss_type
prompts.group_filter: dynamic_sampling_filter_path
prompts.max_refills: dynamic_sampling_max_gen_batches max_num_gen_batches over_sampling_batch_size
prompts.refill: dynamic_filtering use_dynamic_sampling
reference.coefficient: beta init_kl_coef kl_loss_coef reference.init_coef reference_policy_kl_penalty use_kl_loss
reference.estimator: kl_loss_type reference_policy_kl_type use_unbiased_kl
reference.path: ref_load
reward.overlong.buffer_tokens: overlong_buffer_len overlong_buffer_length
reward.overlong.penalty: overlong_buffer_penalty overlong_penalty_factor penalty_factor
rollout.context_tokens: filter_overlong_prompts max_input_seq_length max_len max_prompt_length
rollout.context_tokens: max_total_sequence_length prompt_max_len rollout_max_context_len seq_len
rollout.engines: num_engines rollout_num_gpus use_vllm vllm_mode vllm_num_engines
rollout.extra_args: gpu_memory_utilization sglang_mem_fraction_static
rollout.group_size: n n_samples_per_prompt num_generations num_generations_per_prompt
rollout.max_new_tokens: generate_max_len max_completion_length max_response_length max_tokens response_length
rollout.max_new_tokens: rollout_max_response_len
rollout.prompts_per_batch: batch_size generation_batch_size num_prompts_per_step rollout_batch_size train_batch_size
rollout.replay_experts: use_rollout_routing_replay
rollout.temperature: rollout_temperature
rollout.tensor_parallel: rollout_num_gpus_per_engine vllm_tensor_parallel_size
rollout.top_k: rollout_top_k
rollout.top_p: rollout_top_p
run.name: experiment_name run_name
run.root: checkpoint_dir ckpt_path default_local_dir logging_dir output_dir
run.seed: rollout_shuffle
run.steps: max_num_epochs max_num_steps max_steps num_episodes num_epoch num_rollout num_train_epochs total_epochs
run.steps: total_training_steps
schedule.lag: async_queue_size max_async_level max_trajectory_age_steps partial_rollout
schedule.updates_per_stage: update_weights_interval
task.chat_template: apply_chat_template
task.columns.answer: label_key
task.columns.prompt: input_key prompt_key
task.held_out_path: evaluation.dataset eval_prompt_data val_files
task.path: dataset dataset_name prompt_data prompt_dataset prompt_file train_files
task.reward: custom_rm_path remote_rm_url remote_url reward_fn_key reward_funcs reward_weights rm_type
task.reward (a judge behind HTTP), or distillation.urls for a teacher: rm_url
task.template_arguments: apply_chat_template_kwargs chat_template_kwargs
"""
ELSEWHERE = {
    word: keys
    for line in _WORDS.strip().splitlines()
    for keys, _, words in [line.partition(": ")]
    for word in words.split()
}
"""What other trainers call it → where it is here; docs/coming-from.md says what is different. A word with a
dot is meant in that section alone."""

_SECTIONS = {
    word: section
    for section, words in {
        "advantage": "advantage adv_estimator",
        "checkpoint": "ckpt checkpointing",
        "evaluation": "eval val validation val_kwargs",
        "learner": "actor megatron megatron_cfg dtensor_cfg distributed_data_parallel_config policy",
        "learner.optimizer": "optim optimizer scheduler kwargs",
        "model": "model",
        "reference": "ref kl",
        "reward.overlong": "overlong_buffer",
        "rollout": "rollout generation sampling vllm vllm_cfg inference",
        "run": "trainer train grpo orchestrator data",
        "task.columns": "columns",
    }.items()
    for word in words.split()
}
"""A section of theirs → the one here that holds what there is of it."""

_EXPORT = "no key: `evenkeel export RUN --to wandb --follow` writes it offline, then `wandb sync` (docs/metrics.md)"
_BEFORE = "no key: the version before the first step is always evaluated, and the last one"
_NODES = "no key: learner.data_parallel and the other layout keys, and rollout.engines, say how many GPUs there are"
_ENGINE = "not here: engines are SGLang servers; what they take beside rollout's keys goes into rollout.extra_args"
_TEXT = "not here: models of pictures, video or sound (docs/index.md)"
_TURNS = "not here: tools and environments of several turns (docs/index.md)"
_COLOCATE = (
    "not here: engines that sleep while the learner has their memory; with weights.channel ipc both share one "
    "machine's GPUs (the recipe one_gpu)"
)
_WORDS_NOT_HERE = {
    "not here: a critic, and so no PPO with GAE; advantage.name compares samples of one prompt": "critic value_clip "
    "value_head value_loss value_network vf gae lam lambd gamma cliprange_value",
    "not here: LoRA and other adapters; all weights are trained": "lora peft adapter load_in_4bit",
    "not here: FSDP and DeepSpeed; the learner is Megatron-Core, with learner.tensor_parallel, data_parallel …": "fsdp "
    "fsdp2 deepspeed ds zero zero3 dtensor automodel veomni torchtitan ulysses ring_attn zpg",
    _ENGINE: "vllm trtllm enforce_eager prefix_caching cuda_graph cudagraph chunked_prefill speculative mtp spec draft "
    "max_num_batched_tokens max_num_seqs max_model_len gpu_memory kv_cache_dtype swap_space",
    "not here: Ray; the run's processes meet in its directory": "ray",
    _TEXT: "image images video videos audio multimodal mm vision visual processor",
    _TURNS: "tool tools multi_turn multiturn agent turns interaction env_name max_turns gym",
    "not here: a reward model inside the trainer; a function as task.reward may call a server (docs/rewards.md)": "rm "
    "reward_model reward_pretrain",
    "not here: an entropy bonus; no objective has one": "entropy",
    _COLOCATE: "offload sleep colocate colocated colocate_all hybrid_engine free_cache_engine",
    "not here: an average of weights": "ema ptx",
    "no key: `evenkeel trace RUN` and the report show where time goes": "profiler profile profiling nsys npu",
    "no key: the same command goes on where the run was": "resume resume_mode load_checkpoint load_enable del_local",
    _EXPORT: "wandb swanlab mlflow tensorboard clearml trackio neptune logger logging monitors report_to project_name",
    _BEFORE: "val_before_train eval_on_start skip_eval_before_train val_at_start val_at_end",
    "no key: `evenkeel convert megatron-to-hf` makes a folder of a checkpoint, which an SGLang server serves to any "
    "benchmark (docs/model.md)": "val_only",
    _NODES: "nodes nnodes num_nodes gpus_per_node num_gpus num_gpus_per_node deployment cluster",
    "not here: sampling is by temperature, top_p and top_k": "min_p repetition_penalty presence_penalty "
    "frequency_penalty rollout_stop stop_token_ids stop_strings do_sample generation_kwargs",
    "no key: prompts are always asked in an order of run.seed": "shuffle",
    "no key: prompts that are too long are left out and counted, never cut (rollout.context_tokens)": "truncation",
    "no key: code that a model's folder brings along is never run": "trust_remote_code",
    "not here: a reward from the KL; a section reference adds it to the loss": "kl_in_reward kl_ctrl kl_penalty",
}
NOT_HERE = {word: told for told, words in _WORDS_NOT_HERE.items() for word in words.split()}
"""What others have, by the words of their keys → what is so here."""

_UNKNOWN = "`evenkeel recipe --schema` lists the known ones"
_LONGEST = 80
"""Characters of a key that is compared: a longer one is no misspelling, and comparing takes their square."""
_EVERYWHERE = frozenset(("class", "name", "path"))
"""Keys of many sections: that one of them is called so says nothing about what was meant."""


def meant_by(unknown: str) -> str:
    """What is known about `section.key`: `did you mean run.steps?`, to which choice it belongs, what it is called here
    or that it is not here, or where keys are listed. Keys of one section are not guessed for those of another."""
    known = known_keys()
    *parents, leaf = unknown.split(".")
    ours = bool(parents) and parents[0] in Recipe.model_fields
    if choices := known.get(unknown):
        return f"only {parents[0]} {', '.join(sorted(choices))} has it; choose that, or leave the key out"
    if (parents or [leaf])[0] == "extends":
        return "a recipe file extends another one, by its first line; give that file, or the other recipe itself"
    place = ".".join(parents) if ours else next((_SECTIONS[part] for part in parents[::-1] if part in _SECTIONS), "")
    tail = ".".join(unknown.split(".")[-2:])
    if not ours and tail not in ELSEWHERE:
        for part in reversed(parents):
            if part not in _SECTIONS and (told := _not_here(part)):
                return told
    word = ELSEWHERE.get(f"{place}.{leaf}") or ELSEWHERE.get(tail) or ELSEWHERE.get(leaf)
    if word and place == "rollout" and word.startswith("learner."):  # an engine's own layout, say
        word = next((key for key in [f"rollout.{word.rpartition('.')[2]}"] if key in known), None)
    if word and (not ours or word.startswith(f"{parents[0]}.")):
        return f"here it is {word}"
    theirs = f"{place}.{leaf}" if not ours and parents and _SECTIONS.get(parents[-1]) == place else ""
    if theirs == "advantage.name" or (known.get(theirs) == frozenset() and theirs != "run.name"):
        return f"here it is {theirs}"
    same = [] if leaf in _EVERYWHERE else sorted(key for key in known if key.rpartition(".")[2] == leaf)
    meant = [key for key in same if not parents or (ours and key.startswith(f"{parents[0]}."))]
    told = _not_here(leaf)
    if not told and (meant := meant or _misspelled(parents, leaf)):
        return f"did you mean {' or '.join(meant[:3])}?"
    if not told and ours and len(same) == 1:
        return f"{leaf} is a key of {same[0].rpartition('.')[0]}"
    return told or _UNKNOWN


def _not_here(name: str) -> str | None:
    """What is said of a key with this name, or with one that begins with words of NOT_HERE, or ends with them."""
    words = name.split("_")
    spans = [words[:length] for length in range(len(words), 0, -1)] + [words[begin:] for begin in range(1, len(words))]
    return next((NOT_HERE["_".join(span)] for span in spans if "_".join(span) in NOT_HERE), None)


def _misspelled(parents: list[str], leaf: str) -> list[str]:
    """Keys that are spelled nearly so: of the same section, or sections, where nothing says which is meant."""
    known = known_keys()
    if len(".".join((*parents, leaf))) > _LONGEST:
        return []
    if not parents:
        names = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[2] not in _EVERYWHERE}
        return [names[name] for name in get_close_matches(leaf, names, n=1, cutoff=0.85)]
    sections = {key.rpartition(".")[0] for key in known if "." in key}
    found = get_close_matches(".".join(parents), sections, n=1, cutoff=0.8)
    names = {key.rpartition(".")[2]: key for key in known if found and key.rpartition(".")[0] == found[0]}
    return [names[name] for name in get_close_matches(leaf, names, n=1, cutoff=0.7)]


def all_meant_by(unknown: str, value: object) -> list[str]:
    """`KEY; what is known about it`, of a key that there is not. A section of another trainer has no counterpart here,
    but its keys may have: of such a section that is said of each key that stands in it."""
    told = meant_by(unknown)
    if isinstance(value, dict) and value and not told.startswith("did you mean"):
        lines = [line for key, below in value.items() for line in all_meant_by(f"{unknown}.{named(key)}", below)]
        if {line.partition("; ")[2] for line in lines} != {told}:
            return lines
    return [f"{unknown}; {told}"]


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
