"""A run directory with one whole file of every kind, and each step's records, without engines or learners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config.recipe import Recipe
from pipeline.control.files import ControlFiles, ControlRecord
from pipeline.data.batch import LogprobContract
from pipeline.data.checksums import list_checksums
from pipeline.data.epochs import claim
from pipeline.data.event_log import EventLog
from pipeline.data.membership import Member
from pipeline.data.run_directory import RunDirectory, numbered, unfenced
from pipeline.data.run_recipes import recipe_in_force
from pipeline.data.store import BatchStore
from pipeline.data.zarr_zip import write_zarr_zip
from pipeline.ports.weights import WeightCheck
from pipeline.trainer.checkpoints import Checkpoints
from precision.controller.policy import Evidence, State
from tests.support.batches import CONTRACT, batch_of_rewards
from tests.support.one_rank import OneRank

GROUPS = 2
"""Of each batch."""


class _Learner(OneRank):
    def save(self, directory: Path) -> None:
        (directory / "shard").write_text("weights")


def recipe_of(folder: Path, *, schedule: Mapping[str, Any], steps: int, controlled: bool = False) -> Recipe:
    data: dict[str, Any] = dict(
        run=dict(name="run", root=str(folder), steps=steps),
        model=dict(path="m"),
        task=dict(name="sort_digits"),
        schedule=dict(schedule),
        rollout=dict(precision="fp32", prompts_per_batch=GROUPS, group_size=2),
        evaluation=dict(every=2, prompts=2),
    )
    return Recipe.model_validate(data | (dict(controller=dict()) if controlled else {}))


def whole_run(
    folder: Path,
    *,
    schedule: Mapping[str, Any] = dict(kind="sync"),
    committed: int = 6,
    saved: Sequence[int] = (2, 4),
    published: int = 5,
    policies: Sequence[int] = (3, 4, 5),
    controlled: bool = False,
    steps: int = 8,
    contract: LogprobContract = CONTRACT,
) -> RunDirectory:
    """`committed` batches, of which `published` are trained; checkpoints at `saved`."""
    run = RunDirectory(folder / "run")
    recipe = recipe_of(folder, schedule=schedule, steps=steps, controlled=controlled)
    run.freeze(recipe)
    for role in ("collector", "learner"):
        claim(run.path, role)
    collector, learner = EventLog(run.path, "collector-000001"), EventLog(run.path, "learner-000001")
    for version in range(0, committed, recipe.evaluation.every):
        due = recipe.build_schedule().published_before(version)
        collector.event("evaluated", version=due, pass_at_1=0.5)
        run.write_evaluation(due, dict(pass_at_1=0.5))
    store = BatchStore(run.batches)
    for index in range(committed):
        batch = batch_of_rewards([[1.0, 0.0]] * GROUPS, index=index, seed=index, contract=contract)
        required = recipe.build_schedule().required_version(index)
        store.commit(
            replace(
                batch,
                group=batch.group + GROUPS * index,
                next_group=GROUPS * (index + 1),
                policy_version=np.full(batch.num_response_tokens, required, np.int32),
                recipe_sha256=recipe_in_force(run.path).sha256,
            )
        )
    for step in range(published):
        _record(run, learner, step, controlled)
    for index in range(committed if recipe.schedule.kind == "staged" else 0):
        if recipe.build_schedule().required_version(index) < published:  # its stage has begun
            responses = store.read(index, None).num_response_tokens
            run.write_logprobs(index, np.zeros(responses, np.float32), old=True)
    for version in policies:
        _policy(run, version)
    run.set_published(published)
    checkpoints = Checkpoints(run.checkpoints, keep=9)
    for step in saved:
        checkpoints.save(_Learner(), step, {})  # type: ignore[arg-type]
        learner.event("saved", step=step, seconds=0.0)
    run.membership().announce(Member(0, "http://127.0.0.1:1", 1))
    return run


def _record(run: RunDirectory, learner: EventLog, step: int, controlled: bool) -> None:
    batch = BatchStore(run.batches).read(step, None)
    run.write_logprobs(step, np.zeros(batch.num_response_tokens, np.float32))
    with (run.mismatch / f"{numbered(step)}.zarr.zip").open("wb") as file:
        write_zarr_zip(file, dict(step=step), dict(sums=np.zeros(3), update=np.zeros(batch.num_samples, np.int32)))
    learner.event("consumed", step=step)
    learner.metrics(step, reward_mean=0.5)
    if controlled:
        record = ControlRecord(step=step, evidence=Evidence(step=step, loss=0.0), state=State())
        ControlFiles(run.control, unfenced).create(record)


def _policy(run: RunDirectory, version: int) -> None:
    folder = run.policy_directory(version)
    folder.mkdir()
    (folder / "model.safetensors").write_text(f"version {version}")
    WeightCheck(version=version).save(folder)
    list_checksums(folder)


def finish(run: RunDirectory) -> None:
    """The model and the marks of a run that is done."""
    run.model.mkdir()
    (run.model / "model.safetensors").write_text("final")
    list_checksums(run.model)
    run.set_finished("learner")
    run.set_finished("collector")


def damage(path: Path) -> None:
    """Flip a bit in the middle of a file, or of the first large one of a folder."""
    if path.is_dir():
        path = max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
