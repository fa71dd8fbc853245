"""Run `evenkeel train --replay RUN`: train again on a run's recorded batches, without engines.

    RUN-replay      started, or resumed after an interruption or once RUN has more steps
    RUN-replay-2    made once RUN-replay is finished, which shows what the code and libraries of its time made of RUN
    …

In sync mode with the same layout, the weights come out bit-identical on CPUs; a difference would mean that training
depends on something outside the run directory. On GPUs, some sums have no fixed order (ops/assumptions.md).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from launch.run.claim import claimed
from launch.run.live_view import LiveView
from launch.run.processes import child_environment, run_ranks, torchrun
from pipeline.config.loader import changed_keys, load_recipe
from pipeline.data.checksums import create_sealed, read_sealed_json, remove_listed, verify_folder, write_sealed_json
from pipeline.data.files import is_temporary, make_folder
from pipeline.data.run_directory import RunDirectory
from pipeline.data.run_recipes import RecipeInForce, adopt_recipes, all_recipes
from pipeline.data.store import BatchStore, refuse_to_pass_gone
from pipeline.errors import RunConflictError, StoreError
from pipeline.resume import change_of
from precision.text import listed

_LEARNED_FROM = (
    *("model", "learner", "objective", "correction", "advantage", "reward.overlong", "reference", "distillation"),
    *("schedule", "controller", "rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.kept_set"),
    *("rollout.precision", "rollout.quant_map", "rollout.max_new_tokens", "rollout.replay_experts"),
)
"""Recipe keys and sections that decide what is learned."""


def replay_run(source: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Train in a replay's folder beside SOURCE, and return how the final weights compare, tensor by tensor."""
    original = RunDirectory(source)
    recipes = all_recipes(source)  # raises if SOURCE is no run, or of another version
    wanted = manifest(original)
    newest = recipes[-1]
    if (changed := learned_otherwise(recipes, range(newest.first_step), newest)) is not None:
        # SOURCE is a fork whose recipe learns otherwise than its parent's. A learner has one recipe, in which only the
        # learning rate may change with the steps.
        raise RunConflictError(
            f"{source} cannot be replayed: {changed}, and a replay trains all steps by one; replay the run that it is "
            "a fork of"
        )
    refuse_to_pass_gone(original, 0, newest.recipe.run.steps)
    replayed = Replayed.of(source)
    steps = load_recipe(newest.path, overrides).run.steps
    for number in count(1):
        run = RunDirectory(source.parent / f"{source.name}-replay{f'-{number}' if number > 1 else ''}")
        replayed.refuse_another(run.path)
        if max(run.saved_steps(), default=0) < steps or not run.model_manifest.exists():
            break  # the earlier replays are finished
    overrides = [f"run.name={run.path.name}", *overrides]
    recipes = [replace(one, recipe=load_recipe(one.path, overrides)) for one in recipes]
    recipe = recipes[-1].recipe
    make_folder(run.path)
    with suppress(FileExistsError):
        create_sealed(run.path / RECORD, json.dumps(asdict(replayed)) + "\n")
    replayed.refuse_another(run.path)  # another process may have been first
    with claimed(run):
        adopt_recipes(run.path, recipes)  # steps keep the learning rates that they had
        if _read(record := run.path / RECORD) != replayed:
            write_sealed_json(record, asdict(replayed))  # the run may have more batches by now
        run.make_folders()
        remove_listed(run.model, run.model_manifest.name)  # it may mark a replay of fewer steps as finished
        arguments = (str(run.path), "--replay", str(source))
        command = torchrun(recipe.learner.num_processes, "launch.run.learn_rank", *arguments)
        with LiveView.of_run(run.path, recipe) as view:
            run_ranks(run, command, log=run.logs / "learner.log", env=child_environment(), watch=view.refresh)
    found = manifest(run)
    differing = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    return dict(replay=str(run.path), steps=recipe.run.steps, bit_identical=not differing, differing_tensors=differing)


def manifest(run: RunDirectory) -> dict[str, Any]:
    """Return tensor name → {sha256, shape, dtype} of the final policy, whose files are checked. Raises StoreError."""
    path = run.model_manifest
    try:
        if path.exists():
            verify_folder(run.model, f"`evenkeel repair {run.path}`, then the run started again, exports it anew")
        tensors: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["tensors"]
    except OSError as error:
        raise StoreError(f"{path} is missing: {run.path} was not trained to its end; finish it first") from error
    return tensors


def learned_otherwise(recipes: Sequence[RecipeInForce], steps: range, by: RecipeInForce) -> str | None:
    """Return the first change of what a run learns by, within `steps` or between them and recipe `by`, for a message.
    None: training `steps` by recipe `by` learns the same, except for learning rates."""
    ends = [*(after.first_step for after in recipes[1:]), steps.stop]
    trained = [max(one.first_step, steps.start) < min(end, steps.stop) for one, end in zip(recipes, ends, strict=True)]
    chosen = [one for one, has in zip(recipes, trained, strict=True) if has or one is by]
    for before, after in pairwise(chosen):
        learned_from = {
            key: change
            for key, change in changed_keys(before.recipe, after.recipe).items()
            if any(key == part or key.startswith(f"{part}.") for part in _LEARNED_FROM)
        }
        # A replay has the learning rate of each step. Of the other free keys, only these two change what is learned.
        decides = ("learner.optimizer.weight_decay", "learner.optimizer.clip_grad")
        changes = {
            key: change
            for key, change in learned_from.items()
            if change_of(before.recipe, key) != "free" or key in decides
        }
        if changes:
            names_first = sorted(changes, key=lambda key: not key.endswith(".name"))
            said = listed([f"{key}: {changes[key]}" for key in names_first], most=3)
            return f"at step {after.first_step} its recipe changed ({said})"
    return None


RECORD = "replay.json"
"""File in a replay's folder that records what it learns from."""
_ADVICE = "rename or remove it, then give the command again"


@dataclass(frozen=True)
class Replayed:
    """SHA-256 of each recipe's file, and the checksum of each batch, that a replay learns from, in order."""

    recipes: tuple[str, ...]
    batches: tuple[str, ...]

    @staticmethod
    def of(run: Path) -> Replayed:
        """Return the checksums of a run as it is now. Raises StoreError, CorruptBatchError."""
        recipes, store = all_recipes(run), BatchStore(run / "batches")
        steps = recipes[-1].recipe.run.steps
        return Replayed(
            tuple(one.sha256 for one in recipes),
            tuple(store.checksum(index) for index in store.settled() if index < steps),
        )

    def refuse_another(self, folder: Path) -> None:
        """Raise RunConflictError unless the folder is new or replays this run as it is or was, StoreError for
        damage."""
        path = folder / RECORD
        if path.exists():
            earlier = _read(path)
            parts = (("recipe", earlier.recipes, self.recipes), ("batch", earlier.batches, self.batches))
            for kind, before, now in parts:
                for index, one in enumerate(before):
                    if now[index : index + 1] != (one,):
                        raise RunConflictError(
                            f"{folder} is the replay of another run ({kind} {index} differs); {_ADVICE}"
                        )
        elif os.path.lexists(folder) and not (folder.is_dir() and all(map(is_temporary, os.listdir(folder)))):
            raise RunConflictError(f"{folder} is not a replay: it has no {path.name}; {_ADVICE}")


def _read(path: Path) -> Replayed:
    fields = read_sealed_json(path, f"put back a copy, or rename or remove {path.parent}")
    try:
        return Replayed(tuple(fields["recipes"]), tuple(fields["batches"]))
    except (KeyError, TypeError) as error:
        raise StoreError(f"{path} is damaged ({error!r}); {_ADVICE}") from error
