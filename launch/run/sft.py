"""`evenkeel sft`: supervised fine-tuning with the same learner, under torchrun like training.

parent   freezes the recipe, starts the ranks, shows progress
ranks    demonstrations of the task ──▶ Batch ──▶ learner.update(Supervised) ──▶ checkpoints ──▶ HF folder
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launch.build.components import build_contract, build_quant_map, build_tokenizer
from launch.doctor.needs import check_folder, check_learner_here, check_room
from launch.plan.grace import checkpoint_bytes
from launch.progress import counted
from launch.run.claim import claimed
from launch.run.processes import child_environment, run_child, run_ranks, torchrun
from launch.show.saved import saved_said
from megatron_bridge.hf.model_config import read_hf_config
from megatron_bridge.parallel.layout_checks import check_layout
from pipeline.child_process import die_with_parent, see_own_classes
from pipeline.config.recipe import LearnerSection, Recipe
from pipeline.data.event_log import EventLog, read_metrics
from pipeline.data.files import write_atomically
from pipeline.data.given_batch import Response, given_batch
from pipeline.data.records import Batch, LogprobContract
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RecipeError, RunConflictError
from pipeline.tasks import Task, build_task
from pipeline.tasks.tokenizer import Tokenizer
from pipeline.trainer.checkpoints import Checkpoints

CHECKPOINT_EVERY = 100
SFT_SOURCE = "sft"
SFT_METRICS = ("loss", "entropy", "grad_norm", "lr", "num_tokens", "padding_share")


def run_sft(recipe: Recipe, out: Path, *, steps: int, batch_size: int, lr: float, warmup_steps: int) -> dict[str, Any]:
    """Train on demonstrations and export an HF folder. The same command resumes an interrupted run."""
    if out.exists():
        raise RecipeError(f"--out {out} exists already; remove it or name another folder")
    check_learner_here(recipe)
    check_folder(out, "--out")
    config = read_hf_config(recipe.model.path)
    check_layout(config, recipe.learner)
    optimizer = dict(lr=lr, warmup_steps=warmup_steps, decay="linear", min_lr=0.0)
    recipe = recipe.model_copy(
        update=dict(
            run=recipe.run.model_copy(update=dict(name=f"{recipe.run.name}-sft", steps=steps)),
            learner=LearnerSection.model_validate(
                {**recipe.learner.model_dump(), "optimizer": {**recipe.learner.optimizer.model_dump(), **optimizer}}
            ),
        )
    )
    demonstrations_of(build_task(recipe.task, recipe.run.seed), 0, 1)
    run = RunDirectory(recipe.directory)
    check_room(recipe)
    started = time.time()
    with claimed(run), saved_said(run, steps):
        run.freeze(recipe)
        _freeze_batch_size(run, batch_size)
        _supervise(run, recipe, out, batch_size)
    last = read_metrics(run.path)[-1]
    return dict(model=str(out), steps=steps, loss=last["loss"], wall_s=round(time.time() - started, 1))


def _freeze_batch_size(run: RunDirectory, batch_size: int) -> None:
    """The one setting that is not in the recipe; a run that was begun with another one is not resumed."""
    path = run.path / "batch_size"
    if not path.exists():
        write_atomically(path, f"{batch_size}\n")
    elif (begun := int(path.read_text())) != batch_size:
        raise RunConflictError(
            f"{run.path} was begun with --batch-size {begun}, got {batch_size}; repeat that number or remove the folder"
        )


def _supervise(run: RunDirectory, recipe: Recipe, out: Path, batch_size: int) -> None:
    command = torchrun(recipe.learner.num_processes, "launch.run.sft", str(run.path), str(out), str(batch_size))
    with counted("sft", recipe.run.steps) as show:

        def watch() -> None:
            metrics = read_metrics(run.path)
            if metrics:
                show(len(metrics), f"loss {metrics[-1]['loss']:.3f}")

        run_ranks(run, command, log=run.logs / "learner.log", env=child_environment(), watch=watch)


def demonstrations_of(task: Task, first: int, count: int) -> list[tuple[str, str]]:
    """(prompt, target) of problems first … first + count - 1. Raises RecipeError when the task has none."""
    found = [task.demonstration(index % task.num_prompts) for index in range(first, first + count)]
    pairs = [pair for pair in found if pair is not None]
    if len(pairs) < count:
        raise RecipeError("this task has no demonstrations to train on; start from a model that can already answer")
    return pairs


def supervised_batch(
    step: int, pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer, contract: LogprobContract
) -> Batch:
    """Demonstrations as a Batch: the response is the target and its end token; every advantage is 1."""
    groups = []
    for prompt, target in pairs:
        response = (*tokenizer.encode(target), tokenizer.eos_token_id)
        groups.append((tokenizer.encode(prompt), [Response(response, (0.0,) * len(response), reward=1.0)]))
    return given_batch(step, groups, contract)


def learn_demonstrations(run: RunDirectory, out: Path, batch_size: int) -> None:
    """Body of one rank."""
    from megatron_bridge.learner import MegatronLearner
    from precision.supervised import Supervised

    recipe = run.recipe()
    tokenizer = build_tokenizer(recipe)
    contract = build_contract(recipe, tokenizer)
    task = build_task(recipe.task, recipe.run.seed)
    learner = MegatronLearner.create(
        recipe.model.path,
        recipe.learner,
        objective=Supervised(),
        temperature=1.0,
        seed=recipe.run.seed,
        total_steps=recipe.run.steps,
        emulate=build_quant_map(recipe) if recipe.learner.fp8_emulation else None,
    )
    event_log, checkpoints = (
        EventLog(run.path, SFT_SOURCE),
        Checkpoints(run.checkpoints, keep=1, first_bytes=checkpoint_bytes(learner.model_config, recipe)),
    )
    first, _ = checkpoints.restore(learner)
    for step in range(first, recipe.run.steps):
        pairs = demonstrations_of(task, step * batch_size, batch_size)
        batch = supervised_batch(step, pairs, tokenizer, contract)
        metrics = learner.update(batch, np.ones(batch.num_samples, np.float32), None).metrics
        if learner.is_rank_zero:
            event_log.metrics(step, **{name: metrics[name] for name in SFT_METRICS})
        if (step + 1) % CHECKPOINT_EVERY == 0:
            checkpoints.save(learner, step + 1, {})
    learner.export(out)


if __name__ == "__main__":
    die_with_parent()
    see_own_classes()
    directory = RunDirectory(Path(sys.argv[1]))
    run_child(directory, "sft", lambda: learn_demonstrations(directory, Path(sys.argv[2]), int(sys.argv[3])))
