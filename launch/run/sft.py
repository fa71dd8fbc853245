"""Run `evenkeel sft`: supervised fine-tuning with the learner of RL training, under torchrun.

parent   freezes the recipe, starts the ranks, shows progress
ranks    demonstrations of the task, or the user's rows ──▶ Batch ──▶ learner.update(Supervised) ──▶ checkpoints
                                                                                              at the end: HF folder
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from launch.build.components import build_contract, build_quant_map, build_tokenizer
from launch.build.sizes import checkpoint_bytes
from launch.run.claim import claimed
from launch.run.preflight import check_folder, check_learner_here, check_model_here, check_room, start_left_out
from launch.run.processes import child_environment, run_child, run_ranks, saying_what_is_saved, torchrun
from launch.terminal import counted, going_on
from megatron_bridge.hf.folders import check_free
from megatron_bridge.hf.model_config import read_hf_config
from megatron_bridge.parallel.layout import check_layout
from pipeline.analysis.run_log import SFT_FILE
from pipeline.background import tell_when_done
from pipeline.child_process import append_working_folder_to_path, die_with_parent
from pipeline.config.loader import load_recipe, overridden_keys, recipe_from
from pipeline.config.recipe import Recipe
from pipeline.data.batch import Batch, LogprobContract, Response, given_batch
from pipeline.data.event_log import EventLog, read_metrics
from pipeline.data.files import remove_leftovers, write_atomically
from pipeline.data.run_directory import RunDirectory, unfenced
from pipeline.demonstrations import (
    Demonstration,
    Demonstrations,
    Form,
    learned_end,
    read_demonstrations,
    write_with_end,
)
from pipeline.errors import RecipeError, RunConflictError, StoreError
from pipeline.tasks import Task, build_task
from pipeline.tasks.data import digest_of_data
from pipeline.tasks.mixture import PromptOrder
from pipeline.tasks.tokenizer import Tokenizer
from pipeline.trainer.checkpoints import Checkpoints
from precision.settings import Settings

if TYPE_CHECKING:
    from megatron_bridge.learner import MegatronLearner

CHECKPOINT_EVERY = 100
MOST_WARMUP = 50
DATA_LR, TINY_MODEL_LR = 1e-5, 3e-3
SFT_SOURCE = "sft"
SFT_METRICS = ("loss", "entropy", "grad_norm", "lr", "num_tokens", "padding_share")

_FALLS = "sft's rate falls linearly to zero; leave it out"
INSTEAD = {
    "run.steps": "give --steps",
    "learner.optimizer.lr": "give --lr",
    "learner.optimizer.warmup_steps": "give --warmup-steps",
    "learner.optimizer.decay": _FALLS,
    "learner.optimizer.decay_steps": _FALLS,
    "learner.optimizer.min_lr": _FALLS,
}
"""Recipe key that sft refuses to override → remedy."""


class Source(Settings):
    """The training data of a run; kept in the run directory, so that a resumed run has the same data."""

    batch_size: int
    data: Path | None = None
    """The user's rows; None for the task's demonstrations."""
    sha256: str | None = None
    held_out: Path | float | None = None
    """File of held-out rows, or the share of `data` to hold out."""
    held_out_sha256: str | None = None

    @staticmethod
    def of(batch_size: int, data: Path | None, held_out: str | None) -> Source:
        """Make a source from command options. Raises RecipeError for unreadable files and options that conflict."""
        if not 1 <= batch_size <= 2**20:
            raise RecipeError(f"--batch-size is {batch_size}, expected 1 to {2**20} rows a step")
        if data is None:
            if held_out is not None:
                raise RecipeError("--held-out needs --data: a task's demonstrations are made, not read")
            return Source(batch_size=batch_size)
        other: Path | float | None = None
        if held_out is not None:
            try:
                other = float(held_out)
            except ValueError:
                other = Path(held_out).absolute()
        if isinstance(other, float) and not 0.0 < other < 1.0:
            raise RecipeError(f"--held-out is {held_out}, expected a share between 0 and 1, such as 0.05, or a file")
        return Source(
            batch_size=batch_size,
            data=data.absolute(),
            sha256=_digest(data, "--data"),
            held_out=other,
            held_out_sha256=_digest(other, "--held-out") if isinstance(other, Path) else None,
        )

    @staticmethod
    def read(run: RunDirectory) -> Source:
        """Read the source of a run. Raises StoreError for a damaged file."""
        path = run.path / SFT_FILE
        try:
            return Source.model_validate_json(path.read_bytes())
        except ValueError as error:
            raise StoreError(
                f"{path} does not name the run's data; put back a copy of it, or remove {run.path} and give the "
                "command again"
            ) from error

    def freeze(self, run: RunDirectory) -> None:
        """Write a new run's source. Raises RunConflictError for a run with another source, StoreError for damage."""
        path = run.path / SFT_FILE
        if not path.exists():
            write_atomically(path, self.model_dump_json() + "\n")
            return
        begun, now = Source.read(run).model_dump(), self.model_dump()
        changed = [f"{key} {begun[key]}, got {now[key]}" for key in now if begun[key] != now[key]]
        if changed:
            raise RunConflictError(
                f"{run.path} was begun with {'; '.join(changed)}; repeat the command as it was, or remove the folder"
            )


def _digest(data: Path, option: str) -> str:
    """Return the digest of a data file. Raises RecipeError, naming `option`, if it cannot be read."""
    try:
        return digest_of_data(data)
    except RecipeError as error:
        raise RecipeError(str(error).replace("set task.path to", f"give {option}")) from error


def read_recipe(path: Path | Mapping[str, Any], overrides: Sequence[str], steps: int, data: Path | None) -> Recipe:
    """Read the recipe; `steps` and `data` fill in what it lacks. Raises RecipeError, also for overrides in INSTEAD."""
    for key in overridden_keys(overrides):
        if key in INSTEAD:
            raise RecipeError(f"--set {key}: evenkeel sft does not go by it; {INSTEAD[key]}")
    return load_recipe(path, overrides, fill_in=partial(fill_in, steps=steps, rows=data))


def fill_in(recipe: dict[str, Any], *, steps: int, rows: Path | None) -> None:
    """Add run.steps to a recipe that lacks it, and `rows` as its task's data unless it names another task or data."""
    if isinstance(run := recipe.get("run"), dict):
        run.setdefault("steps", steps)
    if rows is not None:
        task = recipe.setdefault("task", dict(name="data"))
        if isinstance(task, dict) and task.get("name") == "data" and not task.get("sources"):
            task.setdefault("path", str(rows.absolute()))


def run_sft(
    recipe: Recipe,
    out: Path,
    *,
    steps: int,
    batch_size: int,
    lr: float | None,
    warmup_steps: int | None = None,
    data: Path | None = None,
    held_out: str | None = None,
) -> dict[str, Any]:
    """Train on demonstrations and export an HF folder. The same command resumes an interrupted run."""
    if lr is None:
        lr = TINY_MODEL_LR if data is None else DATA_LR
    if out.exists():
        raise RecipeError(f"--out {out} exists already; remove it or name another folder")
    check_learner_here(recipe)
    check_model_here(recipe)
    check_folder(out, "--out")
    config = read_hf_config(recipe.model.path)
    check_layout(config, recipe.learner)
    recipe = sft_recipe(recipe, steps, lr, warmup_steps)
    source = Source.of(batch_size, data, held_out)
    with going_on("reading the rows"):
        look_at(recipe, source)
    run = RunDirectory(recipe.directory)
    check_room(recipe)
    started = time.time()
    with claimed(run), saying_what_is_saved(run, steps):
        run.freeze(recipe)
        source.freeze(run)
        command = torchrun(recipe.learner.num_processes, "launch.run.sft", str(run.path), str(out))
        with counted("sft", steps) as show:

            def watch() -> None:
                metrics = read_metrics(run.path)
                losses = [line["held_out_loss"] for line in metrics if "held_out_loss" in line]
                held = f", held out {losses[-1]:.3f}" if losses else ""
                remark = f"loss {metrics[-1]['loss']:.3f}{held}" if metrics else "the learner starts"
                show(len(metrics), f"{out} is written" if len(metrics) == steps else remark)

            run_ranks(run, command, log=run.logs / "learner.log", env=child_environment(), watch=watch)
    metrics = read_metrics(run.path)
    found = dict(model=str(out), steps=steps, loss=metrics[-1]["loss"], wall_s=round(time.time() - started, 1))
    losses = [line["held_out_loss"] for line in metrics if "held_out_loss" in line]
    return found | (dict(held_out_loss=losses[-1], held_out_loss_before=losses[0]) if losses else {})


def sft_recipe(recipe: Recipe, steps: int, lr: float, warmup_steps: int | None) -> Recipe:
    """Return the fine-tuning run's recipe. By default a short run is not all warm-up. Raises RecipeError."""
    if warmup_steps is None:
        warmup_steps = min(MOST_WARMUP, steps // 4)
    data = recipe.model_dump(mode="json")
    data["run"] |= dict(name=f"{recipe.run.name}-sft", steps=steps)
    data["learner"]["optimizer"] |= dict(lr=lr, warmup_steps=warmup_steps, decay="linear", min_lr=0.0, decay_steps=None)
    if recipe.schedule.kind == "staged":  # unused here, but a stage may not be longer than the run
        data["schedule"]["updates_per_stage"] = min(recipe.schedule.updates_per_stage, steps)
    return recipe_from(data, source="evenkeel sft")


def look_at(recipe: Recipe, source: Source) -> None:
    """Print a summary of the data. Raises RecipeError for unusable data, before anything is started."""
    if source.data is None:
        demonstrations_of(build_task(recipe.task, recipe.run.seed), 0, 1)
        return
    tokenizer = build_tokenizer(recipe)
    training, held_out = read_source(recipe, source, tokenizer)
    held = "" if held_out is None else f", {len(held_out.rows)} held out"
    for sentence in (
        *training.notes,
        *(() if held_out is None or isinstance(source.held_out, float) else held_out.notes),
        f"{len(training.rows)} rows to train on{held}; the first, with what is learned between » and «:",
        training.first,
    ):
        print(sentence, file=sys.stderr)
    if not getattr(recipe.task, "chat_template", False):
        for sentence in start_left_out(tokenizer, training.rows[0].prompt.tolist()):
            print(f"warning: {sentence}", file=sys.stderr)
    if (end := learned_end(training.rows, tokenizer)) is not None:
        print(
            f"answers end by {tokenizer.decode([end], special=True)}, at which servers of {recipe.model.path} do not "
            f"stop; generation_config.json of --out names it too (eos_token_id: {end})",
            file=sys.stderr,
        )


def read_source(recipe: Recipe, source: Source, tokenizer: Tokenizer) -> tuple[Demonstrations, Demonstrations | None]:
    assert source.data is not None
    task, longest = recipe.task, recipe.rollout.context_tokens
    form = Form(
        tokenizer=tokenizer,
        chat_template=bool(getattr(task, "chat_template", False)),
        system_prompt=getattr(task, "system_prompt", None),
    )
    training = read_demonstrations(source.data, form, longest=longest)
    if isinstance(source.held_out, float):
        return training.split(source.held_out)
    if source.held_out is None:
        return training, None
    return training, read_demonstrations(source.held_out, form, longest=longest)


def demonstrations_of(task: Task, first: int, count: int) -> list[tuple[str, str]]:
    """Return (prompt, target) of problems first … first + count - 1. Raises RecipeError if the task has none."""
    found = [task.demonstration(index % task.num_prompts) for index in range(first, first + count)]
    pairs = [pair for pair in found if pair is not None]
    if len(pairs) < count:
        raise RecipeError(
            "this task has no demonstrations to train on; give rows of your own by --data FILE (docs/sft.md), or train "
            "a model that can already answer without sft"
        )
    return pairs


def batch_of(step: int, rows: Sequence[Demonstration], contract: LogprobContract) -> Batch:
    """Return the user's rows as a Batch; what others say inside a conversation counts as not sampled."""
    groups = [
        (
            row.prompt.tolist(),
            [Response(row.response.tolist(), (0.0,) * len(row.response), reward=1.0, learned=row.learned.tolist())],
        )
        for row in rows
    ]
    return given_batch(step, groups, contract)


def held_out_loss(learner: MegatronLearner, rows: Sequence[Demonstration], batch: int, made: LogprobContract) -> float:
    """Return the mean -log pi (nats) of the learned tokens, scored `batch` rows at a time. Collective."""
    total, tokens = 0.0, 0
    for first in range(0, len(rows), batch):
        part = batch_of(0, rows[first : first + batch], made)
        total -= float(learner.logprobs(part)[part.loss_mask].sum(dtype=np.float64))
        tokens += part.num_sampled_tokens
    return total / tokens


def learn_demonstrations(run: RunDirectory, out: Path) -> None:
    """Train as one rank, and export the model to `out`."""
    from megatron_bridge.parallel.layout import set_gpu_environment

    recipe = run.recipe()
    set_gpu_environment(recipe.learner, weights_shared=False)
    from megatron_bridge.learner import MegatronLearner
    from precision.supervised import Supervised

    source = Source.read(run)
    tokenizer = build_tokenizer(recipe)
    contract = build_contract(recipe, tokenizer)
    make, held_out, end = _batches(recipe, source, tokenizer, contract)
    learner = MegatronLearner.create(
        recipe.model.path,
        recipe.learner,
        objective=Supervised(),
        temperature=1.0,
        seed=recipe.run.seed,
        total_steps=recipe.run.steps,
        fp32_lm_head=recipe.model.fp32_lm_head,
        emulate=build_quant_map(recipe) if recipe.learner.fp8_emulation else None,
    )
    event_log, checkpoints = (
        EventLog(run.path, SFT_SOURCE),
        Checkpoints(run.checkpoints, keep=1, first_bytes=checkpoint_bytes(learner.model_config, recipe)),
    )
    tell_when_done(learner, lambda: remove_leftovers(run.checkpoints, unfenced))
    first, _ = checkpoints.restore(learner)
    for step in range(first, recipe.run.steps):
        batch = make(step)
        measured: dict[str, float] = {}
        if held_out and step % CHECKPOINT_EVERY == 0:
            measured["held_out_loss"] = held_out_loss(learner, held_out, source.batch_size, contract)
        metrics = learner.update(batch, np.ones(batch.num_samples, np.float32), None).metrics
        if held_out and step + 1 == recipe.run.steps:
            measured["held_out_loss"] = held_out_loss(learner, held_out, source.batch_size, contract)
        if learner.is_rank_zero:
            event_log.metrics(step, **{name: metrics[name] for name in SFT_METRICS}, **measured)
        if (step + 1) % CHECKPOINT_EVERY == 0:
            checkpoints.save(learner, step + 1, {})
    beside = None if end is None else partial(write_with_end, tokenizer, end)
    learner.export(out, fence=partial(check_free, out), beside=beside)  # a folder made meanwhile is not ours


def _batches(
    recipe: Recipe, source: Source, tokenizer: Tokenizer, contract: LogprobContract
) -> tuple[Callable[[int], Batch], Sequence[Demonstration], int | None]:
    """Return a function step → batch, the held-out rows, and the end token that is learned but at which no server stops
    yet. Rows come in a seeded order, each once an epoch."""
    size = source.batch_size
    if source.data is None:
        task = build_task(recipe.task, recipe.run.seed)

        def demonstrated(step: int) -> Batch:
            groups = []
            for prompt, target in demonstrations_of(task, step * size, size):
                response = (*tokenizer.encode(target), tokenizer.eos_token_id)
                groups.append((tokenizer.encode(prompt), [Response(response, (0.0,) * len(response), reward=1.0)]))
            return given_batch(step, groups, contract)

        return demonstrated, (), None
    training, held_out = read_source(recipe, source, tokenizer)
    order = PromptOrder(len(training.rows), recipe.run.seed)

    def made(step: int) -> Batch:
        chosen = [training.rows[order.problem(number)] for number in range(step * size, (step + 1) * size)]
        return batch_of(step, chosen, contract)

    return made, () if held_out is None else held_out.rows, learned_end(training.rows, tokenizer)


if __name__ == "__main__":
    die_with_parent()
    append_working_folder_to_path()
    directory = RunDirectory(Path(sys.argv[1]))
    run_child(directory, "sft", lambda: learn_demonstrations(directory, Path(sys.argv[2])))
