"""`evenkeel train --replay RUN`: the learner's part of a run again, from its recorded batches, without engines.

In sync mode with the same layout the weights come out bit-identical; anything else would mean that training depends on
something that is not in the run directory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launch.run.claim import claimed
from launch.run.live_view import LiveView
from launch.run.processes import child_environment, run_ranks, torchrun
from pipeline.analysis.alarm_history import samples_coarser
from pipeline.config.loader import load_recipe
from pipeline.data.frozen.recipes import adopt_recipes, all_recipes
from pipeline.data.integrity.folders import verify_folder
from pipeline.data.ledger.lost_batches import refuse_to_pass_lost
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import StoreError


def replay_run(source: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Train into SOURCE-replay (resuming it when it exists) and compare the final weights, tensor by tensor."""
    original = RunDirectory(source)
    original.recipe()  # which also says when SOURCE is no run, or one of another version
    wanted = manifest(original)
    refuse_to_pass_lost(original, BatchStore(original.batches).all_lost(), 0, original.recipe().run.steps)
    overrides = [f"run.name={source.name}-replay", *overrides]
    recipes = [replace(one, recipe=load_recipe(one.path, overrides)) for one in all_recipes(source)]
    recipe = recipes[-1].recipe
    run = RunDirectory(source.parent / f"{source.name}-replay")
    with claimed(run):
        adopt_recipes(run.path, recipes)  # steps keep the learning rates that they had
        run.freeze(recipe)
        command = torchrun(
            recipe.learner.num_processes, "launch.run.learn_rank", str(run.path), "--replay", str(source)
        )
        with LiveView(run.path, recipe.run.steps, quantized=samples_coarser(recipe)) as view:
            run_ranks(run, command, log=run.logs / "learner.log", env=child_environment(), watch=view.refresh)
    found = manifest(run)
    differing = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    return dict(replay=str(run.path), steps=recipe.run.steps, bit_identical=not differing, differing_tensors=differing)


def manifest(run: RunDirectory) -> dict[str, Any]:
    """tensor name → {sha256, shape, dtype} of the final policy, whose files are compared with it. Raises StoreError."""
    path = run.model / "manifest.json"
    try:
        if path.exists():
            verify_folder(run.model, f"`evenkeel repair {run.path}`, then the run started again, exports it anew")
        tensors: dict[str, Any] = json.loads(path.read_text())["tensors"]
    except OSError as error:
        raise StoreError(f"{path} is missing: {run.path} was not trained to its end; finish it first") from error
    return tensors
