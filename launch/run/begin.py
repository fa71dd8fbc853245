"""The beginning of a run: what can be checked before anything is started, and the policy that it starts from."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from launch.build.components import TaskPrompts, build_prompts, build_quant_map, build_tokenizer
from launch.build.engine_arguments import check_extra_args
from launch.build.engines import check_map_dtype, engine_dtype
from launch.build.sizes import check_sizes
from launch.build.teacher import check_teacher
from megatron_bridge.hf.headers import check_weights
from megatron_bridge.hf.model_config import ModelConfig, read_hf_config
from pipeline.config.advice import advice
from pipeline.config.recipe import Recipe
from pipeline.data.checksums import verify_folder
from pipeline.data.run_directory import RunDirectory
from pipeline.demonstrations import unstopped_end
from pipeline.errors import RecipeError
from pipeline.ports.weight_check import WeightCheck
from pipeline.tasks.tokenizer import Tokenizer
from precision.formats.audit import formats_of
from precision.text import listed, quoted


def preflight(recipe: Recipe) -> TaskPrompts:
    """Check what would otherwise fail minutes later, in a child process. Returns the run's prompts. Raises
    FatalError."""
    check_extra_args(recipe)
    config = read_hf_config(recipe.model.path)
    check_sizes(config, recipe)
    build_quant_map(recipe)
    if recipe.rollout.quant_map is not None:
        check_map_dtype(recipe, recipe.rollout.quant_map)
    tokenizer = build_tokenizer(recipe)
    check_weights(recipe.model.path, ModelConfig.from_hf(config))
    verify_folder(recipe.model.path, "make or fetch the model again", required=False)
    if recipe.reference is not None and (reference := recipe.reference.path) is not None:
        read_hf_config(reference, "reference.path")
        check_weights(reference, ModelConfig.from_hf(config))
    check_teacher(recipe, tokenizer)
    prompts = build_prompts(recipe, tokenizer)
    _check_held_out_lengths(recipe, prompts)
    return prompts


def warnings(recipe: Recipe, prompts: TaskPrompts) -> list[str]:
    """What whoever starts the run should know of it: sentences."""
    task, tokenizer = prompts.task, prompts.tokenizer
    told = [
        *advice(recipe),
        *_unseen(recipe, prompts),
        *asked_again(recipe.rollout.prompts_per_batch, task.num_prompts),
        *task.notes,
    ]
    if recipe.evaluation.prompts > task.num_held_out:
        told.append(
            f"evaluations ask all {task.num_held_out} held-out prompts, since there are no {recipe.evaluation.prompts} "
            "(evaluation.prompts): pass@1 is less certain, as its interval says; give more data, or task.held_out_path"
        )
    if task.chat_template:
        return [*told, *_unstopped(tokenizer)]
    return [*told, *start_left_out(tokenizer, tokenizer.encode(task.problem(0).text))]


_MARKS = re.compile("think|thought|reason|answer|solution|tool", re.IGNORECASE)
"""In the name of a special token that a reward of the format may look for, unlike those of roles and ends."""


def _unseen(recipe: Recipe, prompts: TaskPrompts) -> list[str]:
    """A sentence where rewards do not see what the chat template or the recipe has a model write."""
    if recipe.reward.special_tokens:
        return []
    tokenizer = prompts.tokenizer
    asked_for = recipe.to_yaml() + (tokenizer.template if prompts.task.chat_template else "")
    unseen = [token for token in tokenizer.special_tokens if _MARKS.search(token) and token in asked_for]
    if not unseen:
        return []
    return [
        f"rewards do not see {listed(unseen)}, special tokens of {tokenizer.folder}: a reward that looks for them "
        "gives 0 to every sample; set reward.special_tokens to true"
    ]


def asked_again(batch: int, prompts: int) -> list[str]:
    """A sentence where a batch asks for more prompts than a task has."""
    if batch <= prompts:
        return []
    return [
        f"a batch has {batch} prompts (rollout.prompts_per_batch), the task {prompts}: each is asked "
        f"{batch / prompts:.1f} times a batch; lower the first, or give more data"
    ]


def start_left_out(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[str]:
    """A sentence where plain text is read without what other programs put in front of it."""
    leading = tokenizer.leading
    if not leading or list(prompt[: len(leading)]) == leading:
        return []
    return [
        f"prompts are read without {tokenizer.decode(leading, special=True)}, which transformers and vLLM put in front "
        f"of text for {tokenizer.folder}; a chat template of one line writes it (docs/model.md)"
    ]


def _unstopped(tokenizer: Tokenizer) -> list[str]:
    if (end := unstopped_end(tokenizer)) is None:
        return []
    mark = tokenizer.decode([end], special=True)
    return [
        f"the chat template of {tokenizer.folder} ends an answer by {mark}, at which engines do not stop: answers "
        "that end so go on to rollout.max_new_tokens; name it in the folder's generation_config.json, where "
        f"eos_token_id is a list then, with {end} in it"
    ]


def _check_held_out_lengths(recipe: Recipe, prompts: TaskPrompts) -> None:
    """Prompts of data that are too long are gone by now. Of generated ones, those that are evaluated must fit: engines
    refuse them each time."""
    room = recipe.rollout.context_tokens - recipe.rollout.max_new_tokens
    longest = max(prompts.held_out(recipe.evaluation.prompts), key=lambda prompt: len(prompt.tokens))
    if len(longest.tokens) > room:
        raise RecipeError(
            f"the held-out prompt {quoted(longest.text)} has {len(longest.tokens)} tokens, but rollout.context_tokens "
            f"{recipe.rollout.context_tokens} - rollout.max_new_tokens {recipe.rollout.max_new_tokens} leaves {room}; "
            "raise the first, or take the prompt out of the data"
        )


def seed_policy(run: RunDirectory, recipe: Recipe) -> None:
    """Publish the model folder as version 0, so that engines and learner can start side by side.

    No learner has scored a probe of it: engines are verified by their checksums alone.
    """
    if run.is_published():
        return
    from launch.build.weight_checks import checksums_of
    from megatron_bridge.hf.tensor_folder import TensorFolder
    from megatron_bridge.hf.writer import write_policy

    source, folder, digests = recipe.model.path, run.policy_directory(0), checksums_of(recipe)
    tensors, quant = TensorFolder(source).tensors(), build_quant_map(recipe)
    formats = formats_of(quant, engine_dtype(recipe))

    def write_check(folder: Path) -> None:
        known = () if digests is None else digests.digests()
        WeightCheck(version=0, digests=known, formats=formats).save(folder)

    with _all_cores():
        write_policy(tensors, source, folder, quant, digests=digests, beside=write_check, fence=run.fence)
    run.set_published(0)


@contextmanager
def _all_cores() -> Iterator[None]:
    """Torch may compute on every core that this process has: nothing else of the run does before version 0 is there. A
    learner's agent has one thread otherwise (`child_environment`); another number is the user's, and stays."""
    import torch

    before = torch.get_num_threads()
    if before == 1:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
