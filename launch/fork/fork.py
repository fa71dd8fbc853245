"""Make a new run from a checkpoint of an old one: link what it takes over, and check that it is whole.

    checkpoints/STEP      weights, optimizer, random numbers, the loop's state
    batches before STEP   with their kept sets, and with the order of prompts that they hold
    logprobs, mismatch, control, quant_maps, skipped, evaluations, reference.json
                          (another controller, or another ladder for it, begins afresh after STEP)
    metrics and events of those steps, rewritten          recipe.yaml, recipes/: those of the steps
    parent.json           the old run and the step

Nothing is published: the learner publishes its checkpoint's version at its first start. The run is made under a
temporary name, checked with its checksums, and renamed when it is complete. The next fork into the same folder removes
the leftovers of one that was killed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from launch.build.control import build_ladder
from pipeline.config.algorithm import ADVANTAGES, OBJECTIVES
from pipeline.config.loader import changed_keys, load_recipe, override_of
from pipeline.config.recipe import Recipe
from pipeline.config.task_sections import DataTask, SortDigitsTask, SpellDigitsTask
from pipeline.control.files import ControlFiles, ControlRecord
from pipeline.data.checksums import sync_files, write_sealed_json
from pipeline.data.event_log import PARENT, read_events, read_metrics
from pipeline.data.files import (
    NO_HARD_LINKS,
    make_folder,
    move_to_free_name,
    remove_leftovers_of,
    temporary_name,
)
from pipeline.data.run_directory import RunDirectory, numbered, numbered_files, numbered_folders, unfenced
from pipeline.data.run_recipes import add_recipe, adopt_recipes, all_recipes, newest_recipe_file
from pipeline.data.store import BATCH_SUFFIX, LOST_SUFFIX, REMOVED, BatchStore
from pipeline.errors import RunConflictError, StoreError
from pipeline.repair import find_damage, own_recipes
from pipeline.resume import refuse_changes
from pipeline.tasks.data import with_digest
from pipeline.trainer.checkpoints import COMMIT
from precision.controller.policy import State
from precision.text import listed


def fork_run(source: Path, new: Path, step: int, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Make the new run and return where it is. Raises StoreError or RunConflictError; then there is no run."""
    target = source.parent / new if new == Path(new.name) else new
    run = RunDirectory(source)
    before = run.recipe()
    given = dict(override.partition("=")[::2] for override in overrides)
    objective, advantage = OBJECTIVES.get(given.get("objective.name", "")), type(before.advantage)
    old = before.objective.paper_aggregation or str(advantage.model_fields["aggregation"].default)
    if objective is not None and "advantage.aggregation" not in given and before.advantage.aggregation == old:
        # A new objective gets the aggregation of its paper, as in a new recipe, unless the parent was given another.
        advantage = ADVANTAGES.get(given.get("advantage.name", ""), advantage)
        usual = objective.paper_aggregation or advantage.model_fields["aggregation"].default
        overrides = [*overrides, f"advantage.aggregation={usual}"]
    named = [override_of("run.name", target.name), override_of("run.root", target.parent)]
    recipe = load_recipe(newest_recipe_file(source), [*overrides, *named])
    if before.task != recipe.task and isinstance(recipe.task, DataTask):
        unread = recipe.task.model_copy(update=dict(sha256=None, template_sha256=None))
        recipe = with_digest(recipe.model_copy(update=dict(task=unread)), None)
    _refuse(run, before, recipe, target, step)
    make_folder(target.parent)
    remove_leftovers_of(target)
    folder = temporary_name(target)
    try:
        print(f"{target}: linking {source} up to step {step}, then comparing all with its checksums", file=sys.stderr)
        _fill(run, folder, recipe, step)
        if found := find_damage(RunDirectory(folder)):
            damaged = [f"{one.path.relative_to(folder)} {one.problem}" for one in found]
            raise StoreError(
                f"{source} cannot be forked at step {step}: {listed(damaged, most=2)}; `evenkeel repair {source}` first"
            )
        if not move_to_free_name(folder, target):
            raise RunConflictError(f"{target} was made by another process meanwhile; choose another name")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    changes = {
        key: change for key, change in changed_keys(before, recipe).items() if key not in ("run.name", "run.root")
    }
    return dict(run=str(target), parent=str(source), step=step, changes=changes, recipe=str(newest_recipe_file(target)))


def _refuse(run: RunDirectory, before: Recipe, recipe: Recipe, target: Path, step: int) -> None:
    if target.exists():
        raise RunConflictError(f"{target} exists already; name another folder")
    if step not in run.saved_steps():
        raise _no_checkpoint(run, step)
    refuse_changes(str(run.path), before, changed_keys(before, recipe), fork=True)
    if recipe.run.steps < step:
        raise RunConflictError(f"run.steps is {recipe.run.steps}, but the fork begins at step {step}; raise it")
    if recipe.schedule.kind == "staged" and step % recipe.schedule.updates_per_stage:
        raise RunConflictError(
            f"step {step} is within a stage of {recipe.schedule.updates_per_stage} updates, whose beginning no "
            "checkpoint holds; fork at a multiple of schedule.updates_per_stage"
        )
    # Find a change that gives problems other numbers. Prompts of files that are too long have no number
    # (pipeline.tasks.mixture); generated ones are drawn with the seed.
    renumbered, task = "the task" if recipe.task != before.task else None, recipe.task
    longest = [one.rollout.context_tokens - one.rollout.max_new_tokens for one in (before, recipe)]
    if renumbered is None and longest[0] != longest[1] and not isinstance(task, SortDigitsTask | SpellDigitsTask):
        renumbered = "the longest prompt (rollout.context_tokens - rollout.max_new_tokens)"
    if renumbered is None and recipe.run.seed != before.run.seed and not isinstance(task, DataTask):
        renumbered = "run.seed"
    if recipe.prompts.solved_pass_rate is not None and renumbered is not None:
        raise RunConflictError(
            f"{renumbered} changes, and with it the numbers of problems, but prompts.solved_pass_rate counts how often "
            "those of the old numbers were solved; set prompts.solved_pass_rate=null"
        )
    if missing := sorted({*range(step)} - {*BatchStore(run.batches).settled()}):
        raise StoreError(
            f"{run.path} lacks batch {missing[0]}, which the checkpoint has learned from; `evenkeel repair`"
        )


def _no_checkpoint(run: RunDirectory, step: int) -> StoreError:
    saved = ", ".join(map(str, run.saved_steps())) or "none"
    return StoreError(f"{run.path} has no checkpoint of step {step}; there are: {saved} (checkpoint.keep)")


def _fill(run: RunDirectory, folder: Path, recipe: Recipe, step: int) -> None:
    own = dict(name=recipe.run.name, root=recipe.run.root)

    def renamed(one: Recipe) -> Recipe:
        return one.model_copy(update=dict(run=one.run.model_copy(update=own)))

    recipes = all_recipes(run.path)
    taken = [one for one in recipes if one.first_step < step] or recipes[:1]
    adopt_recipes(folder, [replace(one, recipe=renamed(one.recipe)) for one in taken])
    if changed_keys(renamed(taken[-1].recipe), recipe):
        add_recipe(folder, recipe, first_step=step, first_batch=step)
    made = RunDirectory(folder)
    made.make_folders()
    if recipe.reference is not None and recipe.reference == run.recipe().reference and run.reference_file.exists():
        _link(run.reference_file, made.reference_file)
    if run.outside_file.exists():
        _link(run.outside_file, made.outside_file)
    # A running parent may delete the checkpoint meanwhile. It loses its name as a whole, so COMMIT at the end shows
    # that all files were there.
    checkpoint = run.checkpoints / numbered(step)
    with suppress(FileNotFoundError):
        for old in (one for one in checkpoint.rglob("*") if one.is_file()):
            _link(old, made.path / old.relative_to(run.path))
    if not (checkpoint / COMMIT).exists():
        raise _no_checkpoint(run, step)
    before, controlled = taken[-1].recipe, recipe.controller is not None
    rollouts = [(one.rollout, one.weights.channel) for one in (before, recipe)]
    formats = [(one.quantized_format, one.quant_map, bool(one.urls), channel == "ipc") for one, channel in rollouts]
    afresh = controlled and (  # a controller with other rungs, lags or maps cannot continue from its parent's
        before.controller != recipe.controller
        or formats[0] != formats[1]
        or build_ladder(before) != build_ladder(recipe)
    )
    decided = None if afresh else ControlFiles(run.control, run.fence).read(step - 1)
    for old in _files(run, step, decided, controlled=controlled):
        with suppress(FileNotFoundError):  # a running parent has removed a batch; its record is linked after batches
            _link(old, folder / old.relative_to(run.path))
    if controlled and (afresh or decided is not None):
        begun = ControlRecord(step=step - 1, state=State())
        if decided is not None:
            # Forget the parent's engines. The fork counts starts anew, so that its first engine would be taken for one
            # that is to be started again.
            window = tuple(one.model_copy(update=dict(engines={})) for one in decided.state.window)
            state = decided.state.model_copy(update=dict(suspects={}, window=window))
            begun = decided.model_copy(update=dict(state=state, restarts={}, first_seen={}))
        ControlFiles(made.control, unfenced).create(begun)
    events = []
    for event in read_events(run.path):  # of a batch or step before `step`, or of a version or checkpoint up to it
        last = {"batch": step - 1, "version": step, "step": step if event["kind"] == "saved" else step - 1}
        found = [int(event[key]) <= most for key, most in last.items() if isinstance(event.get(key), int)]
        events += [event] if found and all(found) and _known_at(event, step) else []
    logs = dict(metrics=[line for line in read_metrics(run.path) if line["step"] < step], events=events)
    for name, lines in logs.items():
        make_folder(folder / name)
        path = folder / name / f"{PARENT}.jsonl"
        path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
        sync_files([path])
    write_sealed_json(made.parent_file, dict(run=str(run.path.resolve()), step=step, recipes=sorted(own_recipes(run))))
    sync_files([folder, *(one for one in folder.rglob("*") if one.is_dir())])


def _files(run: RunDirectory, step: int, decided: ControlRecord | None, *, controlled: bool) -> Iterator[Path]:
    """Yield the files to link beside the checkpoint. `decided` is the record that the controller continues from, or
    None. A controlled fork writes the last control record anew."""
    for folder, endings, last in (
        (run.batches, (BATCH_SUFFIX, LOST_SUFFIX), step - 1),
        (run.batches / REMOVED, (".json",), step - 1),
        (run.logprobs, (".npy", "-old.npy"), step - 1),
        (run.mismatch, (".zarr.zip",), step - 1),
        (run.control, (".json",), step - 2 if controlled else step - 1),
    ):
        for ending in endings:
            yield from (path for number, path in numbered_files(folder, ending).items() if number <= last)
    for number, path in numbered_files(run.evaluations, ".json").items():
        if number <= step and _known_at(run.evaluation(number), step):
            yield path
    last_map = -1 if decided is None else decided.state.quant_map  # later ones are decided anew
    yield from (path for number, path in numbered_files(run.quant_maps, ".yaml").items() if number <= last_map)
    if run.skipped.is_dir():
        yield from (run.skipped / numbered(one) for one in numbered_folders(run.skipped) if one < step)


def _known_at(told: Mapping[str, Any], step: int) -> bool:
    """Return whether no answer of an evaluation, as a file or an event tells it, is of a version after `step`."""
    return all(version <= step for version, _ in told.get("answered", ()))


def _link(old: Path, new: Path) -> None:
    make_folder(new.parent)
    try:
        os.link(old, new)
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:  # such as another file system
            raise
        shutil.copyfile(old, new)
        sync_files([new])
