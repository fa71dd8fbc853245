"""Plan counts as many passes over a batch as the learner that a recipe builds takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from launch.build import learner as module
from launch.build.components import scoring_passes
from launch.build.learner import build_trainer
from pipeline.config.algorithm import CORRECTIONS, OBJECTIVES
from pipeline.config.loader import recipe_from
from pipeline.config.recipe import Recipe
from pipeline.data.batch import Batch
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RecipeError
from pipeline.ports.learner import Update
from tests.support.batches import batch_of_rewards, update_of
from tests.support.one_rank import OneRank

SCHEDULES: tuple[dict[str, Any], ...] = (
    dict(kind="sync"),
    dict(kind="async", lag=1),
    dict(kind="staged", updates_per_stage=2),
)
STEPS = range(2, 6)
"""Two stages, and behind the first batches, which are not stale."""


class Counting(OneRank):
    """Counts the responses' tokens that it scores."""

    def __init__(self) -> None:
        self.tokens = 0

    def score(self, batch: Batch) -> Tensor:
        self.tokens += batch.num_response_tokens
        return torch.zeros(batch.num_response_tokens)

    def update(self, batch: Batch, *_: Any, **__: Any) -> Update:
        zeros = torch.zeros(batch.num_response_tokens)
        return Update(metrics=dict(num_tokens=1.0, entropy=0.5), histogram=[1.0], device_logprobs=zeros)


class Versions:
    """Scores what an older version sampled."""

    def __init__(self, learner: Counting) -> None:
        self._learner = learner

    def keep(self, version: int) -> None:
        pass

    def logprobs(self, batch: Batch) -> Tensor | None:
        return None if set(batch.policy_version) == {batch.index} else self._learner.score(batch)


class Reference(Versions):
    def logprobs(self, batch: Batch) -> Any:
        return self._learner.score(batch).numpy()


def recipes(objective: str) -> Iterator[Recipe]:
    """Whatever goes with an objective; what is no recipe is left out."""
    for schedule, updates, lr_by_lag, at, correction, reference in product(
        SCHEDULES, (1, 4), ("none", "ess"), ("update", "sampling"), CORRECTIONS, (False, True)
    ):
        data: dict[str, Any] = dict(
            run=dict(name="r", steps=8),
            model=dict(path="m"),
            task=dict(name="sort_digits"),
            objective=dict(name=objective),
            schedule=schedule,
            learner=dict(updates_per_batch=updates, old_logprobs_at=at, optimizer=dict(lr_by_lag=lr_by_lag)),
            correction=dict(name=correction),
            reference=dict(coefficient=0.1) if reference else None,
        )
        with suppress(RecipeError):
            yield recipe_from(data, source="test")


def taken(recipe: Recipe, run: RunDirectory) -> float:
    """Passes over a batch that the recipe's learner takes."""
    learner, schedule, tokens = Counting(), recipe.build_schedule(), 0
    made: Any = SimpleNamespace
    trainer = build_trainer(
        run, recipe, learner, store=made(), contract=made(), checkpoints=made(), event_log=made(event=None)
    )  # type: ignore[arg-type]
    for step in STEPS:
        batch = batch_of(step)
        sampled = np.full_like(batch.policy_version, schedule.required_version(step))
        update_of(trainer, replace(batch, policy_version=sampled))
        tokens += batch.num_response_tokens
    return learner.tokens / tokens


def batch_of(index: int) -> Batch:
    return batch_of_rewards([[1.0, 0.0]] * 4, index=index, seed=index)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_batch_is_scored_as_often_as_plan_counts(
    objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_bridge.step.host_weights.KeptVersions", lambda of, lag: Versions(of))
    monkeypatch.setattr("megatron_bridge.step.host_weights.ReferencePolicy", lambda of, folder: Reference(of))
    monkeypatch.setattr(module, "require_same_reference", lambda *_: None)
    monkeypatch.setattr(module, "BatchSource", lambda **_: SimpleNamespace(wait=lambda index, _: batch_of(index)))
    run = RunDirectory(tmp_path)
    run.make_folders()
    counted = {repr(recipe): (scoring_passes(recipe), taken(recipe, run)) for recipe in recipes(objective)}
    assert len(counted) > 20
    assert {name: both for name, both in counted.items() if both[0] != both[1]} == {}


@pytest.mark.parametrize(
    ("objective", "sections", "expected"),
    [
        ("clipped", dict(learner=dict(updates_per_batch=4, optimizer=dict(lr_by_lag="ess"))), 2),
        ("mu_grpo", dict(learner=dict(updates_per_batch=4, optimizer=dict(lr_by_lag="ess"))), 2),
        ("p4o", dict(learner=dict(updates_per_batch=4)), 2),
        ("split", dict(schedule=SCHEDULES[2]), 2),
        ("cispo", dict(), 0),
        ("p3o", dict(reference=dict(coefficient=0.1)), 2),
    ],
)
def test_passes_by_hand(objective: str, sections: dict[str, Any], expected: int) -> None:
    data: dict[str, Any] = dict(run=dict(name="r", steps=8), model=dict(path="m"), task=dict(name="sort_digits"))
    assert scoring_passes(recipe_from(data | dict(objective=dict(name=objective)) | sections, source="t")) == expected
