"""Going on with a run, with the recipe that it has or with one that changes what is safe.

    look       which keys differ, and whether a run that holds what this one holds may change them
    fence      whoever still works by the old recipe is superseded: the next start of each role reads the new one
    clear      marks that nothing is left to do, where steps were added; what was made for version 0, where the run has
               no batch and may change everything
    record     one file, created exclusively: recipes/000001.yaml (pipeline.data.run_recipes)
    note       one event a change, for people

A start that is killed between two of these leaves a run that goes on with either recipe; the next one notes its change.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from pipeline.config.loader import changed_keys
from pipeline.config.recipe import Recipe
from pipeline.control.files import ControlFiles
from pipeline.data.checksums import remove_listed
from pipeline.data.epochs import ROLES, supersede
from pipeline.data.event_log import EventLog, read_events
from pipeline.data.files import fsync_present, remove_folder
from pipeline.data.run_directory import RunDirectory
from pipeline.data.run_recipes import (
    add_recipe,
    all_recipes,
    begin_recipe,
    newest_recipe_file,
    num_optimizer_steps,
    recipe_file,
)
from pipeline.errors import StoreError
from pipeline.resume.rules import MAY_FIX_FORMATS, RULES, SAFE, refuse_impossible, refuse_unsafe, rule_of
from pipeline.tasks.data import DIGEST_KEYS


def changes_to(run: RunDirectory, recipe: Recipe) -> dict[str, str]:
    """What the recipe would change of the run, key → `old → new`; nothing for a run that has not begun. Raises
    RunConflictError for what the run cannot go on with, and StoreError for a fork without its checkpoint."""
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
        refuse_unsafe(str(run.path), changes)
        published = run.published_version() if run.is_published() else 0
        scored = max(run.saved_steps(), default=0) if any(run.logprobs.glob("*-old.npy")) else 0
        refuse_impossible(
            before,
            recipe,
            run=str(run.path),
            settled=settled,
            published=published,
            scored=scored,
            optimizer_steps=num_optimizer_steps(all_recipes(run.path), before.run.steps),
            num_promoted=_num_promoted(run) if changes.keys() & MAY_FIX_FORMATS else 0,
        )
    return changes


def _num_promoted(run: RunDirectory) -> int:
    record = ControlFiles(run.control, run.fence).newest()
    return 0 if record is None else len(record.promoted)


def nothing_left(run: RunDirectory, recipe: Recipe) -> bool:
    """Whether the run is finished, and the recipe adds nothing to it."""
    return run.is_finished() and run.recipe().run.steps == recipe.run.steps


def reopen(run: RunDirectory) -> None:
    """A finished run has steps to train again; roles that find it finished would end. Its model is that of fewer steps,
    and is believed no more."""
    _remove_files(run.path / "finished")
    remove_listed(run.model, run.model_manifest.name)


def go_on_with(run: RunDirectory, recipe: Recipe) -> dict[str, str]:
    """Begin the run with the recipe, or go on with it; returns what it changes. Raises as `changes_to` does."""
    begin_recipe(run.path, recipe)
    if changes := changes_to(run, recipe):
        run.fence()
        _end_other_starts(run, recipe)
        changes_to(run, recipe)  # again: one of them may have committed the first batch meanwhile
        _clear(run, recipe, changes)
        learned, settled = run.num_learned(), run.num_settled()
        add_recipe(run.path, recipe, first_step=learned, first_batch=settled)
    if newest_recipe_file(run.path) != recipe_file(run.path):
        # Those that began meanwhile and read the old one; also if the start that changed it was killed before this.
        _end_other_starts(run, recipe)
    run.make_folders()
    return changes


def note_changes(run: RunDirectory, event_log: EventLog) -> None:
    """An event for every change of the recipe that has none: a start that was killed after its change wrote none."""
    recipes, noted = all_recipes(run.path), set[str]()
    if len(recipes) == 1:
        return
    with suppress(
        StoreError
    ):  # a line that is damaged: nothing goes by events, and one that is there twice does no harm
        noted = {str(event.get("recipe")) for event in read_events(run.path, "recipe_changed")}
    for before, after in pairwise(recipes):
        if after.path.name not in noted:
            changes = changed_keys(before.recipe, after.recipe)
            event_log.event("recipe_changed", recipe=after.path.name, step=after.first_step, changes=changes)


def said(run: RunDirectory, changes: Mapping[str, str]) -> str:
    """The changes in one line, for whoever started the run."""
    listed = "; ".join(f"{key}: {change}" for key, change in changes.items())
    return f"{run.path} goes on from step {run.num_learned()} with {listed}"


def _end_other_starts(run: RunDirectory, recipe: Recipe) -> None:
    """Whoever samples, serves or learns by another recipe is superseded, and started again by whom it was started. A
    role that has waited for this one goes by it at once, and to engines and router no data matters."""
    epochs = run.path / "epochs"
    changes = {one.path.name: changed_keys(one.recipe, recipe).keys() for one in all_recipes(run.path)}
    for folder in sorted(epochs.iterdir()) if epochs.is_dir() else ():
        role = folder.name.partition("-")[0]
        if role in ROLES and role != "supervisor":
            free = DIGEST_KEYS if role in ("engine", "router") else frozenset[str]()
            supersede(folder, [name for name, keys in changes.items() if keys <= free])


def _clear(run: RunDirectory, recipe: Recipe, changes: Mapping[str, str]) -> None:
    if run.recipe().run.steps != recipe.run.steps:
        reopen(run)
    if run.num_settled() == 0 and any(RULES[rule_of(key)] is not SAFE for key in changes):
        _remove_files(run.published)  # first: what is announced must be there
        _remove_files(run.evaluations)
        for began_with in (run.sandbox_file, run.reference_file):
            began_with.unlink(missing_ok=True)
        if run.policy_directory(0).is_dir():
            remove_folder(run.policy_directory(0))
        fsync_present(run.policies, run.path)


def _remove_files(folder: Path) -> None:
    for path in folder.iterdir() if folder.is_dir() else ():
        path.unlink()
    fsync_present(folder)
