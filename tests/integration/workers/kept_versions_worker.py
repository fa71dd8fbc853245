"""The learner loop on recorded batches whose tokens older versions sampled; see test_kept_versions.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from launch.build.components import build_objective
from launch.verify.layout_ranks import CONTRACT, make_batch, weights
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.parallel.layout import Layout, initialize, leave_layout
from pipeline.config.recipe import LearnerSection, OptimizerSection, parse_layout
from pipeline.data.batch import Batch
from pipeline.data.store import BatchStore
from pipeline.errors import StoppedError
from tests.support.learners import trainer_on
from tests.support.runs import a_recipe

STEPS, LAG, STOP = 6, 2, 4


def batch(index: int, vocabulary: int) -> Batch:
    """Begun at the oldest version that may be, a version later in the middle of a response, some of it not sampled."""
    made = make_batch(index, vocabulary)
    place = np.arange(made.num_response_tokens) - np.repeat(made.response_offsets[:-1], made.response_lengths)
    oldest, sample = max(0, index - LAG), np.repeat(np.arange(made.num_samples), made.response_lengths)
    version = np.minimum(oldest + (place > 8) + (sample % 3 == 0), index).astype(np.int32)
    sampled = place % 7 != 3
    rollout = np.where(sampled, made.rollout_logprobs, np.float32(0.0))
    return dataclasses.replace(made, index=index, policy_version=version, loss_mask=sampled, rollout_logprobs=rollout)


class Watched(MegatronLearner):
    """Remembers what the policy thought of every batch at every version, before the version was gone."""

    def watch(self, batches: list[Batch]) -> None:
        self.batches, self.thought = batches, [[self.logprobs(one) for one in batches]]
        self.given: list[Any] = []

    def update(self, *arguments: Any, **named: Any) -> Any:
        self.given.append(named["old_logprobs"])
        done = super().update(*arguments, **named)
        self.thought.append([self.logprobs(one) for one in self.batches])
        return done

    def at_sampling(self, index: int) -> Any:
        """[responses] from what was remembered; 0 where nothing was sampled."""
        one = self.batches[index]
        each = np.stack([self.thought[version][index] for version in range(index + 1)])
        found = each[np.minimum(one.policy_version, index), np.arange(one.num_response_tokens)]
        return np.where(one.loss_mask, found, 0.0)


def train(folder: Path, section: LearnerSection, *, every: int, stop_after: int = STEPS) -> Watched:
    chosen = a_recipe(
        run=dict(steps=STEPS),
        objective=dict(name="split"),
        schedule=dict(kind="async", lag=LAG),
        learner=dict(optimizer=dict(lr_by_lag="ess")),
    )
    learner = Watched(
        folder.parent / "model", section, build_objective(chosen), temperature=CONTRACT.temperature, total_steps=STEPS
    )
    store = BatchStore(folder.parent / "batches")
    batches = [batch(index, learner.model_config.vocab_size) for index in range(STEPS)]
    if learner.is_rank_zero:
        for one in batches[store.next_index :]:
            store.commit(one)
    learner.barrier()
    trainer = trainer_on(
        folder,
        chosen,
        learner,
        store,
        contract=CONTRACT,
        every=every,
        stop_requested=lambda: learner.is_rank_zero and stop_after <= learner.step < STEPS,
    )
    learner.watch(batches)
    try:
        trainer.train()
        assert stop_after == STEPS, "it was asked to stop"
    except StoppedError:
        assert stop_after == STOP
    return learner


def measure(folder: Path, first: str, second: str) -> None:
    """Train in layout `first`; again, stopped and gone on with in it; and again, gone on with in `second`."""
    base = LearnerSection(
        precision="fp32",
        micro_batch_tokens=48,
        step_deadline_s=240,
        optimizer=OptimizerSection(lr=3e-3, warmup_steps=0, eps=1e-4),
    )
    found: dict[str, Any] = {}
    for name, layouts in (("whole", (first,)), ("resumed", (first, first)), ("moved", (first, second))):
        for number, layout in enumerate(layouts):
            section = base.model_copy(update=parse_layout(layout))
            initialize(Layout.of(section), seed=0, deadline_s=240)
            stop = STOP if number + 1 < len(layouts) else STEPS
            learner = train(folder / name, section, every=STEPS, stop_after=stop)
            if name == "whole":
                found |= {f"given {i}": np.array(0.0 if x is None else x) for i, x in enumerate(learner.given)}
                found |= {f"present {i}": learner.thought[i][i] for i in range(STEPS)}
                found |= {f"expected {i}": learner.at_sampling(i) for i in range(STEPS)}
            found[name] = weights(learner)
            leave_layout()
    if torch.distributed.get_rank() == 0:
        np.savez(folder / "found.npz", **found)
