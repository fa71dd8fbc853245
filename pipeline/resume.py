"""Resume a run, with its recipe or with one that changes only safe keys.

    look       the changed keys, and whether the run's contents allow the changes
    fence      supersede every start with the old recipe: the next start of each role reads the new recipe
    clear      marks of a finished run, where steps were added; the files of version 0, where a run without a batch
               changes more than free keys
    record     one file, created exclusively: recipes/000001.yaml (pipeline.data.run_recipes)
    note       one event per change, for people

A start that is killed in between leaves a run that resumes with either recipe; the next start notes its change.

Each section of the recipe classifies its keys (pipeline.config.sections.Section.on_resume): `free` keys may change at
any start, `fork` keys in a fork, `never` keys in neither. A run without a batch may change everything.

The run also depends on files outside of its directory, its first weights and the code of its rewards, which may differ
at its next start. RUN/outside.json records them by step. A change is no error: it is reported once, noted, and marks
where a curve's numbers begin to belong to another reward.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.machinery import PathFinder
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline.config.loader import changed_keys
from pipeline.config.recipe import Recipe
from pipeline.config.sections import Change
from pipeline.config.task_sections import DataTask
from pipeline.control.files import ControlFiles
from pipeline.data.checksums import fingerprints, read_sealed_json, remove_listed, write_sealed_json
from pipeline.data.epochs import ROLES, supersede
from pipeline.data.event_log import EventLog, read_events
from pipeline.data.files import fsync_present, remove_folder
from pipeline.data.run_directory import RunDirectory
from pipeline.data.run_recipes import (
    add_recipe,
    all_recipes,
    begin_recipe,
    newest_recipe_file,
    recipe_file,
)
from pipeline.errors import RunConflictError, StoreError
from pipeline.tasks.data import DIGEST_KEYS
from precision.text import listed

_WHY = {"fork": "batches or weights so far were made with the old value", "never": "checkpoints hold the old form"}
_CUTS_MICRO_BATCHES = (
    *("learner.micro_batch_tokens", "learner.data_parallel", "learner.tensor_parallel", "learner.sequence_parallel"),
    *("learner.pipeline_parallel", "learner.virtual_pipeline", "learner.context_parallel", "learner.expert_parallel"),
    "learner.expert_tensor_parallel",
)
"""The keys that decide which samples share a micro-batch."""
_REMEDY = "remove it: what there is now is then taken for what the run began with"
_CHANGED = {
    "weights": "the weights that the run began with were changed since its last start ({files}): what a start without "
    "a checkpoint trains from step {step} on begins with others",
    "reward": "the code of the reward was changed since the last start ({files}): rewards and held-out scores from "
    "step {step} on are no continuation of those before",
}


def change_of(recipe: Recipe, key: str) -> Change:
    """Return a key's class of change, as the innermost section that classifies it says."""
    node: Any = recipe
    found: Change = "fork"
    for part in key.split("."):
        if not isinstance(node, BaseModel):
            break
        said: Mapping[str, Change] = getattr(type(node), "on_resume", {})
        found = said.get(part, said.get("*", found))
        node = getattr(node, part, None)
    return found


def refuse_changes(run: str, before: Recipe, changes: Mapping[str, str], *, fork: bool = False) -> None:
    """Raise RunConflictError when a run with a batch, or a `fork` of it, may not change keys (key → `old → new`)."""
    classes = {key: change_of(before, key) for key in changes}
    refused = [
        f"{key}: {change} ({_WHY[classes[key]]})"
        for key, change in changes.items()
        if classes[key] == "never" or (classes[key] == "fork" and not fork)
    ]
    if refused and fork:
        raise RunConflictError(f"a fork of {run} cannot have {listed(refused)}; begin a run from the model instead")
    if refused:
        raise RunConflictError(
            f"{run} cannot go on with {listed(refused, most=3)}: restore what it was, begin another run.name, or "
            f"make a new run from a checkpoint of this one: `evenkeel fork {run} NEW --at STEP`"
        )


def refuse_impossible(
    before: Recipe,
    after: Recipe,
    *,
    run: str,
    settled: int,
    published: int,
    scored: int,
    optimizer_steps: int,
    num_promoted: int = 0,
) -> None:
    """Raise RunConflictError for free keys whose new value does not fit the run's contents.

    `settled` steps are sampled, trained or published, and engines serve version `published`. The newest checkpoint
    holds `scored` steps, or 0 where stages are not scored at their beginning. `optimizer_steps` is their number up to
    the last step of `before`. The ESS controller keeps `num_promoted` modules unquantized.
    """
    old, new, changed = before.run.steps, after.run.steps, changed_keys(before, after)
    fork = f"`evenkeel fork {run} NEW --at"
    if new < settled:
        raise RunConflictError(
            f"run.steps: {old} → {new}, but {run} holds {settled} steps; use at least that, or {fork} STEP`"
        )
    stage = before.schedule.updates_per_stage if before.schedule.kind == "staged" else 1
    last = old // stage * stage
    if new > old and last < max(published, scored):  # batches of the stage would lack old log-probabilities
        raise RunConflictError(
            f"run.steps: {old} → {new}, but the last stage of {run}, which ends at step {old}, is under way or over, "
            f"and {old} is no multiple of schedule.updates_per_stage {stage}; {fork} {last}` goes on from before it"
        )
    keeps = {"rollout.urls": bool(after.rollout.urls), "weights.channel": after.weights.channel == "ipc"}
    if num_promoted and (fixed := [key for key, keep in keeps.items() if keep and key in changed]):
        raise RunConflictError(
            f"{listed(fixed)}: engines of rollout.urls, and those on the learner's GPUs (weights.channel ipc), keep "
            f"their formats, but the ESS controller of {run} holds {num_promoted} modules unquantized; restore what "
            f"it was, or {fork} STEP`, whose controller begins afresh"
        )
    if after.objective.facts.depends_on_micro_batches and (
        moved := [key for key in changed if key in _CUTS_MICRO_BATCHES]
    ):
        raise RunConflictError(
            f"{listed(moved)}: they cut micro-batches otherwise, and objective {after.objective.name} learns from each "
            f"by itself: restore what it was, or {fork} STEP`"
        )
    optimizer = after.learner.optimizer
    if new != old and optimizer.decay != "constant" and optimizer.decay_steps is None:
        whole = optimizer_steps + (new - old) * after.learner.updates_per_batch
        raise RunConflictError(
            f"run.steps: {old} → {new}, but learner.optimizer.decay is {optimizer.decay} over all steps: say where it "
            f"ends with learner.optimizer.decay_steps={optimizer_steps} (then the rate stays at min_lr) or ={whole} "
            "(then the steps that are left have the rates of the longer run)"
        )
    if "weights.channel" in changed and "delta" in (before.weights.channel, after.weights.channel):
        raise RunConflictError(
            f"weights.channel: {changed['weights.channel']}, but policies by delta are made from those before them; "
            f"restore the value, or {fork} STEP`"
        )


def changes_to(run: RunDirectory, recipe: Recipe) -> dict[str, str]:
    """Return the recipe's changes, key → `old → new`; {} before the run has begun. Raises RunConflictError for changes
    that the run cannot resume with, and StoreError for a fork without its checkpoint."""
    if not recipe_file(run.path).exists():
        return {}
    if (forked_at := run.forked_at()) > max(run.saved_steps(), default=0) and not nothing_left(run, recipe):
        raise StoreError(
            f"{run.path} is a fork at step {forked_at}, and holds no checkpoint of that step or a later one: it would "
            "train its parent's steps again; remove it and fork again, at a step that the parent still holds"
        )
    before = run.recipe()
    changes = changed_keys(before, recipe)
    if settled := run.num_settled():
        refuse_changes(str(run.path), before, changes)
        formats_may_be_fixed = changes.keys() & {"rollout.urls", "weights.channel"}
        record = ControlFiles(run.control, run.fence).newest() if formats_may_be_fixed else None
        recipes = all_recipes(run.path)
        refuse_impossible(
            before,
            recipe,
            run=str(run.path),
            settled=settled,
            published=run.published_version() if run.is_published() else 0,
            scored=max(run.saved_steps(), default=0) if any(run.logprobs.glob("*-old.npy")) else 0,
            optimizer_steps=sum(
                (end - one.first_step) * one.recipe.learner.updates_per_batch
                for one, end in zip(recipes, [*(one.first_step for one in recipes[1:]), before.run.steps], strict=True)
            ),
            num_promoted=0 if record is None else len(record.promoted),
        )
    return changes


def nothing_left(run: RunDirectory, recipe: Recipe) -> bool:
    """Return whether the run is finished and the recipe adds no steps."""
    return run.is_finished() and run.recipe().run.steps == recipe.run.steps


def reopen(run: RunDirectory) -> None:
    """Mark a finished run as unfinished, since roles would end at once, and invalidate its final model."""
    _remove_files(run.path / "finished")
    remove_listed(run.model, run.model_manifest.name)


def go_on_with(run: RunDirectory, recipe: Recipe) -> dict[str, str]:
    """Begin or resume the run with the recipe, and return its changes. Raises as `changes_to` does."""
    begin_recipe(run.path, recipe)
    if changes := changes_to(run, recipe):
        run.fence()
        _end_other_starts(run, recipe)
        before = run.recipe()
        changes_to(run, recipe)  # again: a superseded start may have committed the first batch meanwhile
        if before.run.steps != recipe.run.steps:
            reopen(run)
        if run.num_settled() == 0 and any(change_of(before, key) != "free" for key in changes):
            _remove_files(run.published)  # first, since an announced version must exist
            _remove_files(run.evaluations)
            for began_with in (run.sandbox_file, run.reference_file):
                began_with.unlink(missing_ok=True)
            if run.policy_directory(0).is_dir():
                remove_folder(run.policy_directory(0))
            fsync_present(run.policies, run.path)
        add_recipe(run.path, recipe, first_step=run.num_learned(), first_batch=run.num_settled())
    if newest_recipe_file(run.path) != recipe_file(run.path):
        # Those that started meanwhile with the old recipe, or before a start that was killed after changing the recipe.
        _end_other_starts(run, recipe)
    run.make_folders()
    return changes


def _end_other_starts(run: RunDirectory, recipe: Recipe) -> None:
    """Supersede every start by another recipe, to be restarted. Changed data does not affect engines or router."""
    epochs = run.path / "epochs"
    changes = {one.path.name: changed_keys(one.recipe, recipe).keys() for one in all_recipes(run.path)}
    for folder in sorted(epochs.iterdir()) if epochs.is_dir() else ():
        role = folder.name.partition("-")[0]
        if role in ROLES and role != "supervisor":
            free = DIGEST_KEYS if role in ("engine", "router") else frozenset[str]()
            supersede(folder, [name for name, keys in changes.items() if keys <= free])


def _remove_files(folder: Path) -> None:
    for path in folder.iterdir() if folder.is_dir() else ():
        path.unlink()
    fsync_present(folder)


def note_changes(run: RunDirectory, event_log: EventLog) -> None:
    """Write an event for every change of the recipe without one: a killed start may have written none."""
    recipes, noted = all_recipes(run.path), set[str]()
    if len(recipes) == 1:
        return
    with suppress(StoreError):  # no process acts on events, and a duplicate does no harm
        noted = {str(event.get("recipe")) for event in read_events(run.path, "recipe_changed")}
    for before, after in pairwise(recipes):
        if after.path.name not in noted:
            changes = changed_keys(before.recipe, after.recipe)
            event_log.event("recipe_changed", recipe=after.path.name, step=after.first_step, changes=changes)


def changes_in_words(run: RunDirectory, changes: Mapping[str, str]) -> str:
    """Return the changes in one line, for the user who started the run."""
    listed_changes = "; ".join(f"{key}: {change}" for key, change in changes.items())
    return f"{run.path} goes on from step {run.num_learned()} with {listed_changes}"


def note_outside(run: RunDirectory, recipe: Recipe, event_log: EventLog) -> list[str]:
    """Record the outside files; return a sentence for each kind that changed, also an event. Raises StoreError."""
    path = run.outside_file
    notes = read_sealed_json(path, _REMEDY)["notes"] if path.exists() else []
    known = notes[-1] if notes else {}
    found = dict(weights=_weights(recipe.model.path, known.get("weights", {})), reward=_reward(recipe))
    if {**known, **found} == known:
        return []
    changed: dict[str, list[str]] = {}
    for kind, now in found.items():
        before = known.get(kind)
        if before is None or (
            kind == "reward" and {name.partition("/")[0] for name in before} != {name.partition("/")[0] for name in now}
        ):
            continue  # another recipe names other files, which is reported as a change of the recipe
        names = sorted(n for n in now.keys() | before.keys() if now.get(n, [None])[-1] != before.get(n, [None])[-1])
        if names:
            changed[kind] = names
    step = run.num_learned() if notes else 0
    run.fence()
    for kind, names in changed.items():
        event_log.event("files_changed", what=kind, step=step, files=names)
    write_sealed_json(path, dict(notes=[*notes, dict(step=step, **found)]))
    return [_CHANGED[kind].format(files=listed(names, most=3), step=step) for kind, names in changed.items()]


def reward_code(run: RunDirectory) -> str:
    """Return a digest of the code of the run's custom rewards; "" for built-in rewards and without a record."""
    if not run.outside_file.exists():
        return ""
    files = read_sealed_json(run.outside_file, _REMEDY)["notes"][-1]["reward"]
    return hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:12] if files else ""


def _weights(folder: Path, known: dict[str, Any]) -> dict[str, list[Any]]:
    """Return each file's bytes, modification time and SHA-256; unchanged bytes and time save reading it again."""
    found = dict[str, list[Any]]()
    for file in sorted(folder.glob("*.safetensors")):
        stat = file.stat()
        before = known.get(file.name, [])
        if before[:2] == [stat.st_size, stat.st_mtime_ns]:
            found[file.name] = before
        elif (one := fingerprints([file])[0]) is not None:
            found[file.name] = [stat.st_size, stat.st_mtime_ns, one.sha256]
    return found


def _reward(recipe: Recipe) -> dict[str, list[Any]]:
    """Return the SHA-256 of each file, as `package.module:function/file`, of custom rewards and group filters."""
    task = recipe.task
    rewards = [task.reward, *(source.reward for source in task.sources)] if isinstance(task, DataTask) else []
    found = dict[str, list[Any]]()
    own = {one for one in (*rewards, recipe.prompts.group_filter) if one and not one.startswith("pipeline.")}
    for name in sorted(own):
        for file in _files(name.partition(":")[0]):
            found[f"{name}/{file.name}"] = [hashlib.sha256(file.read_bytes()).hexdigest()]
    return found


def _files(module: str) -> Iterator[Path]:
    """Yield a module's files, without importing anything."""
    places, spec, above = list[str](sys.path), None, ""
    for part in module.split("."):
        spec = PathFinder.find_spec(f"{above}{part}", places)
        if spec is None:
            return
        places, above = list(spec.submodule_search_locations or ()), f"{above}{part}."
    if spec is not None and places:
        yield from sorted(file for place in places for file in Path(place).rglob("*.py"))
    elif spec is not None and spec.origin is not None and Path(spec.origin).is_file():
        yield Path(spec.origin)
