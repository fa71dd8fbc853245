"""Which recipe key was meant by one that there is not: misspelled, in the wrong section, of another choice, or another
trainer's word."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from pipeline.config.recipe import Recipe
from precision.text.near import near

_ELSEWHERE = {
    "apply_chat_template": "task.chat_template",
    "batch_size": "rollout.prompts_per_batch",
    "dataset_name": "task.path",
    "entropy_coeff": "objective",
    "epsilon": "objective.clip_low and objective.clip_high",
    "eps_clip": "objective.clip_low and objective.clip_high",
    "epsilon_high": "objective.clip_high",
    "eval_steps": "evaluation.every",
    "global_batch_size": "rollout.prompts_per_batch",
    "gradient_checkpointing": "learner.recompute",
    "input_key": "task.columns.prompt",
    "label_key": "task.columns.answer",
    "learning_rate": "learner.optimizer.lr",
    "logging_dir": "run.root",
    "loss_type": "objective.name",
    "lr_scheduler_type": "learner.optimizer.decay",
    "lr_warmup_steps": "learner.optimizer.warmup_steps",
    "max_completion_length": "rollout.max_new_tokens",
    "max_grad_norm": "learner.optimizer.clip_grad",
    "max_prompt_length": "rollout.context_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "max_steps": "run.steps",
    "max_tokens": "rollout.max_new_tokens",
    "model_name_or_path": "model.path",
    "n_samples_per_prompt": "rollout.group_size",
    "num_generations": "rollout.group_size",
    "num_iterations": "learner.updates_per_batch",
    "num_rollout": "run.steps",
    "output_dir": "run.root",
    "per_device_train_batch_size": "learner.micro_batch_tokens",
    "ppo_mini_batch_size": "learner.updates_per_batch",
    "prompt_data": "task.path",
    "prompt_key": "task.columns.prompt",
    "reward_funcs": "task.reward",
    "rollout_batch_size": "rollout.prompts_per_batch",
    "rollout_max_response_len": "rollout.max_new_tokens",
    "rollout_temperature": "rollout.temperature",
    "save_interval": "checkpoint.every",
    "save_freq": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "tensor_model_parallel_size": "learner.tensor_parallel",
    "test_freq": "evaluation.every",
    "total_epochs": "run.steps",
    "total_training_steps": "run.steps",
    "train_batch_size": "rollout.prompts_per_batch",
    "train_files": "task.path",
    "val_files": "task.held_out_path",
}
"""What TRL, verl and slime call it → where it is here."""


def meant_by(unknown: str) -> str:
    """What is known about `section.key`: `did you mean run.steps?`, to which choice it belongs, or where keys are
    listed."""
    known, leaf = known_keys(), unknown.rpartition(".")[2]
    if choices := known.get(unknown):
        section = unknown.partition(".")[0]
        return f"only {section} {', '.join(sorted(choices))} has it; choose that, or leave the key out"
    if unknown.partition(".")[0] == "extends":
        return "a recipe file extends another one, by its first line; give that file, or the other recipe itself"
    if leaf in _ELSEWHERE:
        return f"here it is {_ELSEWHERE[leaf]}"
    same = sorted(key for key in known if key.rpartition(".")[2] == leaf)
    like = [key for key in near(unknown, known) if near(leaf, [key.rpartition(".")[2]])]
    if found := same[:3] or like[:1]:
        return f"did you mean {' or '.join(found)}?"
    return "`evenkeel recipe --schema` lists the known ones"


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
