"""Check recipe, model, data and machine before a run starts, and publish the model as version 0.

Checks of the machine take less than a second and write nothing: the learner's packages, a model with weights, a GPU
where the recipe asks for one, ports, and a folder with room.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from launch.build.components import TaskPrompts, build_prompts, build_quant_map, build_tokenizer
from launch.build.engines import check_extra_args, check_map_dtype, checksums_maker, engine_dtype
from launch.build.sizes import checkpoint_bytes, refusals
from launch.build.teacher import check_teacher
from launch.run.starter import metrics_ports
from megatron_bridge.hf.headers import check_weights
from megatron_bridge.hf.model_config import ModelConfig, read_hf_config
from megatron_bridge.model.megatron_settings import check_settings
from megatron_bridge.model.te_precision import is_fp8
from pipeline.config.loader import SHIPPED
from pipeline.config.recipe import Recipe, advice
from pipeline.data.checksums import verify_folder
from pipeline.data.files import require_space
from pipeline.data.run_directory import RunDirectory
from pipeline.demonstrations import unstopped_end
from pipeline.episodes.chat_format import ChatFormat
from pipeline.errors import MachineError, PortInUseError, RecipeError
from pipeline.importing import LEARNER, absent, how_to_install
from pipeline.ports.weights import WeightCheck
from pipeline.tasks.tokenizer import Tokenizer
from precision.formats.audit import formats_of
from precision.text import listed, quoted
from rollout_sglang.server.start import check_port_free, has_cuda

_MARKS = re.compile("think|thought|reason|answer|solution|tool", re.IGNORECASE)
"""Parts of special tokens' names that a format reward may look for, unlike the tokens of roles and ends."""


def preflight(recipe: Recipe) -> TaskPrompts:
    """Return the run's prompts, after checks that would otherwise fail minutes later. Raises FatalError."""
    check_extra_args(recipe)
    config = read_hf_config(recipe.model.path)
    for refused in refusals(config, recipe):
        raise refused
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
    if recipe.episode is not None:
        ChatFormat.of(tokenizer)
    prompts = build_prompts(recipe, tokenizer)
    # Data rows that are too long have been removed. Engines would always refuse generated prompts that are too long.
    room = recipe.rollout.context_tokens - recipe.rollout.max_new_tokens
    longest = max(prompts.held_out(recipe.evaluation.prompts), key=lambda prompt: len(prompt.tokens))
    if len(longest.tokens) > room:
        raise RecipeError(
            f"the held-out prompt {quoted(longest.text)} has {len(longest.tokens)} tokens, but rollout.context_tokens "
            f"{recipe.rollout.context_tokens} - rollout.max_new_tokens {recipe.rollout.max_new_tokens} leaves {room}; "
            "raise the first, or take the prompt out of the data"
        )
    return prompts


def start_warnings(recipe: Recipe, prompts: TaskPrompts) -> list[str]:
    task, tokenizer = prompts.task, prompts.tokenizer
    sentences = list(advice(recipe))
    if not recipe.reward.special_tokens:
        asked_for = recipe.to_yaml() + (tokenizer.template if task.chat_template else "")
        unseen = [token for token in tokenizer.special_tokens if _MARKS.search(token) and token in asked_for]
        if unseen:
            sentences.append(
                f"rewards do not see {listed(unseen)}, special tokens of {tokenizer.folder}: a reward that looks for "
                "them gives 0 to every sample; set reward.special_tokens to true"
            )
    batch = recipe.rollout.prompts_per_batch
    if batch > task.num_prompts:
        sentences.append(
            f"a batch has {batch} prompts (rollout.prompts_per_batch), the task {task.num_prompts}: each is asked "
            f"{batch / task.num_prompts:.1f} times a batch; lower the first, or give more data"
        )
    sentences += task.notes
    if recipe.evaluation.prompts > task.num_held_out:
        sentences.append(
            f"evaluations ask all {task.num_held_out} held-out prompts, since there are no {recipe.evaluation.prompts} "
            "(evaluation.prompts): pass@1 is less certain, as its interval says; give more data, or task.held_out_path"
        )
    if not task.chat_template:
        return [*sentences, *start_left_out(tokenizer, tokenizer.encode(task.problem(0).text))]
    if (end := unstopped_end(tokenizer)) is not None:
        mark = tokenizer.decode([end], special=True)
        sentences.append(
            f"the chat template of {tokenizer.folder} ends an answer by {mark}, at which engines do not stop: answers "
            "that end so go on to rollout.max_new_tokens; name it in the folder's generation_config.json, where "
            f"eos_token_id is a list then, with {end} in it"
        )
    return sentences


def start_left_out(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[str]:
    """Return a warning if plain text is read without the leading tokens that other programs add; else an empty list."""
    leading = tokenizer.leading
    if not leading or list(prompt[: len(leading)]) == leading:
        return []
    return [
        f"prompts are read without {tokenizer.decode(leading, special=True)}, which transformers and vLLM put in front "
        f"of text for {tokenizer.folder}; a chat template of one line writes it (docs/model.md)"
    ]


def seed_policy(run: RunDirectory, recipe: Recipe) -> None:
    """Publish the model folder as version 0, so that engines and learner can start side by side. No learner has scored
    a probe of this version, so engines are verified by checksums alone."""
    if run.is_published():
        return
    import torch

    from megatron_bridge.hf.folders import write_policy
    from megatron_bridge.hf.tensor_files import TensorFolder

    source, folder, maker = recipe.model.path, run.policy_directory(0), checksums_maker(recipe)
    digests = None if maker is None else maker()
    tensors, quant = TensorFolder(source).tensors(), build_quant_map(recipe)
    formats = formats_of(quant, engine_dtype(recipe))

    def write_check(folder: Path) -> None:
        known = () if digests is None else digests.digests()
        WeightCheck(version=0, digests=known, formats=formats).save(folder)

    # Nothing else of the run computes before version 0 is there, so one thread, the default of `child_environment`,
    # becomes all cores. Another number was set by the user, and stays.
    threads = torch.get_num_threads()
    if threads == 1:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        write_policy(tensors, source, folder, quant, digests=digests, beside=write_check, fence=run.fence)
    finally:
        torch.set_num_threads(threads)
    run.set_published(0)


def check_learner_here(recipe: Recipe) -> None:
    """Raise MachineError if this machine cannot run the recipe's learner, RecipeError if its Megatron-Core does not
    take what learner.megatron sets."""
    if missing := absent(LEARNER):
        raise MachineError(
            f"this machine has no {', '.join(missing)}, which the learner needs: {how_to_install(*missing)}"
        )
    check_settings(recipe.learner)
    precision = recipe.learner.precision
    if not is_fp8(precision):
        return
    remedy = "or bf16, with learner.fp8_emulation=true to train under the rollout's FP8 all the same"
    if not has_cuda():
        raise MachineError(
            f"learner.precision is {precision}, which Transformer Engine computes on a GPU, and this machine has none; "
            f"use fp32, {remedy}"
        )
    if absent(("transformer_engine",)):
        raise MachineError(
            f"learner.precision is {precision}, and this machine has no Transformer Engine: "
            f"{how_to_install('transformer_engine')}; or use fp32, {remedy}"
        )


def check_model_here(recipe: Recipe) -> None:
    """Raise RecipeError if model.path leads to a model that ships with Even Keel, which has sizes but no weights."""
    path = recipe.model.path
    place = path if path.exists() else SHIPPED / path
    if (place / "config.json").is_file() and place.resolve().parent == (SHIPPED / "models").resolve():
        raise RecipeError(
            f"model.path is {path}, sizes that come with Even Keel for `evenkeel plan`: that folder holds no weights; "
            "fetch or make the model and set model.path to its folder"
        )


def check_ports(recipe: Recipe, metrics_port: int | None = None) -> None:
    """Raise PortInUseError if a port of the recipe or of a role's metrics is taken. Otherwise the roles would fail at
    it one after another, and be restarted again and again."""
    first, rollout = recipe.rollout.port, recipe.rollout
    named = range(0) if first is None else range(first, first + rollout.started_engines + rollout.starts_router)
    for port in named:
        check_port_free(port)
    for role, port in metrics_ports(recipe, metrics_port).items():
        try:
            check_port_free(port)
        except PortInUseError:
            trouble = "is taken"
        else:
            trouble = "is one of those from rollout.port on" if port in named else ""
        if trouble:
            raise PortInUseError(
                f"port {port} {trouble}, and the {role} shows its metrics there; give another --metrics-port, or none"
            )


def check_room(recipe: Recipe) -> None:
    """Raise MachineError if the run's folder cannot be written, and DiskFullError if the disk cannot hold the policies
    and checkpoints that a run keeps, with one more of each while it is written."""
    run = RunDirectory(recipe.directory)
    check_folder(run.path, "run.root")
    config = ModelConfig.from_hf(read_hf_config(recipe.model.path))
    policy = config.num_parameters * recipe.learner.parameter_bytes
    if not run.saved_steps():
        policies = min(recipe.weights.keep + 2, recipe.run.steps + 1)  # the served one, and the one that is written
        checkpoints = min(recipe.checkpoint.keep + 1, -(-recipe.run.steps // recipe.checkpoint.every))
        kept = f"{policies} policies (weights.keep) and {checkpoints} checkpoints (checkpoint.keep)"
        needed = policies * policy + checkpoints * checkpoint_bytes(config, recipe)
        require_space(nearest_above(run.path), needed, f"{kept} of run {recipe.run.name}")


def check_folder(folder: Path, key: str) -> None:
    """Raise MachineError, naming the recipe key or option `key`, if nothing can be written below a folder."""
    there = nearest_above(folder)
    if not there.is_dir():
        raise MachineError(f"{folder} cannot be made: {there} is a file; set {key} to a folder")
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        raise MachineError(f"{folder} cannot be written: {there} is mounted read-only; set {key} to another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise MachineError(
            f"{folder} cannot be written: this user may not write in {there}; set {key} to another folder, or give the "
            "user the permission"
        )


def nearest_above(path: Path) -> Path:
    path = path.absolute()
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path
