"""The learner loop on recorded batches with several optimizer steps a batch; see test_mini_batches.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from launch.build.components import build_objective
from launch.build.learner import build_trainer
from launch.verify.layout_ranks import CONTRACT, make_batch, weights
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.parallel.layout import Layout, initialize, leave_layout
from pipeline.config.loader import recipe_from
from pipeline.config.recipe import LearnerSection, OptimizerSection, Recipe, parse_layout
from pipeline.data.batch import Batch
from pipeline.data.event_log import EventLog
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import StoppedError
from pipeline.trainer.checkpoints import Checkpoints

STEPS, UPDATES = 3, 4
GRPO: dict[str, Any] = dict(
    objective=dict(name="clipped", anchor="old", clip_low=0.01, clip_high=0.01), correction=dict(name="tis")
)
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one update": (1, GRPO),
    "grpo": (UPDATES, GRPO | dict(advantage=dict(name="grpo", aggregation="sequence", zero_variance="skip"))),
    "scalerl": (
        UPDATES,
        dict(
            objective=dict(name="cispo"),
            advantage=dict(name="dr_grpo", batch_normalized=True, aggregation="prompt", zero_variance="exclude"),
        ),
    ),
    "p3o": (UPDATES, dict(objective=dict(name="p3o"))),
}
"""Updates a batch, and what is learned from them. Of four groups one has equal rewards: with `skip` one update has
nothing to learn from, with `exclude` there are three updates."""


def batch(index: int, vocabulary: int) -> Batch:
    made = make_batch(index, vocabulary)
    equal = made.group == index % 4
    reward = np.where(equal, 1.0, np.arange(made.num_samples) % 3 == 0)
    return dataclasses.replace(made, reward=reward.astype(np.float32), index=index)


def recorded(directory: Path, vocabulary: int) -> BatchStore:
    """The batches of all runs; the first run, of one process, writes them."""
    store = BatchStore(directory)
    for index in range(store.next_index, STEPS):
        store.commit(batch(index, vocabulary))
    return store


def recipe(case: str) -> Recipe:
    updates, algorithm = CASES[case]
    base = dict(run=dict(name="r", steps=STEPS), model=dict(path="m"), task=dict(name="sort_digits"))
    return recipe_from(base | dict(learner=dict(updates_per_batch=updates)) | algorithm, source="test")


def train(
    folder: Path, section: LearnerSection, case: str, *, every: int = 1, stop_after: int = STEPS
) -> tuple[MegatronLearner, Any]:
    """A learner that goes on from the newest checkpoint of `folder`, saves one `every` so many batches, and is asked to
    stop after `stop_after` batches, which rank 0 alone knows."""
    chosen, updates = recipe(case), CASES[case][0]
    learner = MegatronLearner(
        folder.parent / "model",
        section,
        build_objective(chosen),
        temperature=CONTRACT.temperature,
        total_steps=STEPS * updates,
    )
    before = weights(learner)
    run, store = RunDirectory(folder), recorded(folder.parent / "batches", learner.model_config.vocab_size)
    run.make_folders()
    trainer = build_trainer(
        run,
        chosen,
        learner,
        store=store,
        contract=CONTRACT,
        checkpoints=Checkpoints(run.checkpoints, keep=2),
        checkpoint_every=every,
        event_log=EventLog(run.path, "learner-000001"),
        stop_requested=lambda: learner.is_rank_zero and stop_after * updates <= learner.step < STEPS * updates,
    )
    try:
        trainer.train()
        assert stop_after == STEPS, "it was asked to stop"
    except StoppedError:
        assert [path.name for path in run.checkpoints.iterdir()] == [f"{stop_after:06d}"]
    return learner, weights(learner) - before


def measure(folder: Path, layouts: list[str]) -> None:
    """Write LAYOUT.npz: for each case how far the weights moved and how many steps that took, and a resumed run."""
    for layout in layouts:
        base = LearnerSection(
            precision="fp32",
            micro_batch_tokens=48,
            step_deadline_s=240,
            # Adam divides by the gradient's own size: a small eps would blow rounding differences up to whole steps.
            optimizer=OptimizerSection(lr=3e-3, warmup_steps=2, decay="cosine", eps=1e-4),
        )
        section = base.model_copy(update=parse_layout(layout))
        initialize(Layout.of(section), seed=0, deadline_s=240)
        found = {}
        for case in CASES:
            learner, change = train(folder / f"{layout} {case}", section, case)
            found[case] = change
            found[f"{case} steps"] = np.array(learner.step)
        train(folder / f"{layout} resumed", section, "grpo", every=STEPS, stop_after=1)
        learner, _ = train(folder / f"{layout} resumed", section, "grpo", every=STEPS)
        found["resumed"] = weights(learner)
        whole = MegatronLearner(
            folder / "model", section, build_objective(recipe("grpo")), temperature=1, total_steps=1
        )
        whole.load(folder / f"{layout} grpo" / "checkpoints" / f"{STEPS:06d}")
        found["uninterrupted"] = weights(whole)
        if torch.distributed.get_rank() == 0:
            np.savez(folder / f"{layout}.npz", **found)  # type: ignore[arg-type]
        leave_layout()
