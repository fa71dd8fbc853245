"""The readers of a run directory, as the product calls them. Each returns all that it read, as text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from launch.build.components import build_tokenizer
from launch.build.engines import engine_spec
from launch.convert.folders import check_committed, checked_source
from launch.roles.base import Rendezvous
from launch.roles.engine import hold_weights
from launch.run.replay import manifest
from launch.verify.history import check_history
from pipeline.analysis.samples import Background, render_batch
from pipeline.analysis.summary import summary
from pipeline.control.files import ControlFiles
from pipeline.data.epochs import newest
from pipeline.data.quant_maps import NumberedMaps, read_quant_map
from pipeline.data.run_directory import RunDirectory, numbered_folders
from pipeline.data.store import BatchStore
from pipeline.errors import StoreError
from pipeline.ports.weights import WeightCheck
from pipeline.trainer.checkpoints import Checkpoints
from rollout_sglang.weights.update_lease import Updates


def history(path: Path) -> str:
    """`evenkeel verify history`, which reads every file."""
    found = check_history(path)
    if found["damaged"]:
        raise StoreError("; ".join(found["damaged"]))
    return json.dumps(found, sort_keys=True)


def resume(path: Path) -> str:
    """What a learner and a collector read when they are started again."""
    run = RunDirectory(path)
    recipe = run.recipe()
    state = Checkpoints(run.checkpoints, recipe.checkpoint.keep)._newest()
    steps = range(recipe.run.steps)
    old = [None if (kept := run.old_logprobs(step)) is None else kept.tolist() for step in steps]
    control = ControlFiles(run.control, run.fence)
    maps = NumberedMaps(run.quant_maps, run.fence)
    numbers = [int(one.stem) for one in sorted(run.quant_maps.glob("*.yaml"))]
    said = (recipe.to_yaml(), run.published_version(), run.is_finished(), run.sandbox(), state, old)
    return repr((*said, control.newest(), control.decisions(), [maps.read(number) for number in numbers]))


def show(path: Path) -> str:
    """`evenkeel runs show`, and what a report is drawn from."""
    return repr(summary(path))


def replay(path: Path) -> str:
    """What `evenkeel train --replay` compares its weights with."""
    return json.dumps(manifest(RunDirectory(path)), sort_keys=True)


def trajectories(path: Path) -> str:
    """`evenkeel trajectories show`, of every batch."""
    run = RunDirectory(path)
    tokenizer = build_tokenizer(run.recipe())
    store = BatchStore(run.batches)
    background, lines = Background(path), list[str]()
    for index in store.committed():
        learner = run.learner_logprobs(index)
        lines += render_batch(store.read(index, None), tokenizer, background, learner_logprobs=learner)
    return "\n".join(lines)


def engine_start(path: Path) -> str:
    """What an engine reads when it is started, and a fleet when it verifies that one."""
    run = RunDirectory(path)
    recipe = run.recipe()
    spec = hold_weights(run, 0, 0, 1, lambda: engine_spec(run, recipe, 0, 1, None, log=None))
    try:
        folder = run.policy_directory(spec.version)
        held = sorted(one.name for one in spec.model.iterdir())
        return repr((spec, held, WeightCheck.load(folder, int(folder.name)), read_quant_map(folder)))
    finally:
        shutil.rmtree(spec.model, ignore_errors=True)


def roles(path: Path) -> str:
    """What roles read of one another."""
    run = RunDirectory(path)
    updates = Updates(run.updates)
    epochs = {one.name: newest(one) for one in sorted((path / "epochs").iterdir())}
    members = run.membership()
    said = (epochs, members.engines(), members.router(), updates.given(), updates.under_way(), updates.newest())
    return repr((*said, Rendezvous.read(path / "learner.json")))


def convert(path: Path) -> str:
    """What `evenkeel convert` checks of checkpoints and of a model."""
    run = RunDirectory(path)
    for step in numbered_folders(run.checkpoints):
        check_committed(run.checkpoints / f"{step:06d}")
    return repr(checked_source(run.model))


READERS: dict[str, Callable[[Path], str]] = {
    reader.__name__: reader for reader in (history, resume, show, replay, trajectories, engine_start, roles, convert)
}
