"""The beginning of a run: what can be checked before anything is started, and the policy that it starts from."""

from __future__ import annotations

from launch.build.components import TaskPrompts, build_prompts, build_quant_map, build_tokenizer
from launch.build.engines import check_map_dtype, engine_dtype
from launch.build.teacher import check_teacher
from megatron_bridge.hf.headers import check_weights
from megatron_bridge.hf.model_config import ModelConfig, read_hf_config
from megatron_bridge.parallel.layout_checks import check_layout, check_longest_sample
from pipeline.config.formats import check_mixture
from pipeline.config.recipe import Recipe
from pipeline.data.integrity.folders import verify_folder
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RecipeError
from pipeline.ports.weight_check import WeightCheck
from pipeline.tasks import Task
from precision.formats.audit import formats_of
from precision.text.short import quoted
from rollout_sglang.server.block_shapes import check_block_shapes


def preflight(recipe: Recipe) -> Task:
    """Check what would otherwise fail minutes later, in a child process. Returns the run's task. Raises FatalError."""
    config = read_hf_config(recipe.model.path)
    check_layout(config, recipe.learner)
    check_longest_sample(recipe.learner, recipe.rollout.context_tokens)
    if recipe.rollout.precision == "fp8_block":
        check_block_shapes(config, recipe.rollout.tensor_parallel)
    shape = ModelConfig.from_hf(config)
    _check_positions(recipe, shape)
    check_mixture(recipe.rollout.quantized_format, experts=shape.experts is not None)
    build_quant_map(recipe)
    if recipe.rollout.quant_map is not None:
        check_map_dtype(recipe, recipe.rollout.quant_map)
    tokenizer = build_tokenizer(recipe)
    check_weights(recipe.model.path, shape)
    verify_folder(recipe.model.path, "make or fetch the model again", required=False)
    check_teacher(recipe, tokenizer)
    prompts = build_prompts(recipe, tokenizer)
    if recipe.evaluation.prompts > prompts.task.num_held_out:
        raise RecipeError(
            f"evaluation.prompts is {recipe.evaluation.prompts}, but the task holds out only "
            f"{prompts.task.num_held_out} prompts; lower it or give more"
        )
    _check_held_out_lengths(recipe, prompts)
    return prompts.task


def _check_positions(recipe: Recipe, shape: ModelConfig) -> None:
    """SGLang does not start with a longer context than the model has positions for."""
    if recipe.rollout.context_tokens > shape.max_positions:
        raise RecipeError(
            f"rollout.context_tokens is {recipe.rollout.context_tokens}, but {recipe.model.path} takes "
            f"{shape.max_positions} tokens at most (max_position_embeddings of its config.json); lower "
            "rollout.context_tokens"
        )


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
    write_policy(tensors, source, folder, quant, digests=digests, fence=run.fence)
    formats = formats_of(quant, engine_dtype(recipe))
    WeightCheck(version=0, digests=() if digests is None else digests.digests(), formats=formats).save(folder)
    run.set_published(0)
