"""One optimizer step of a learner on each of several batches, from the same weights; see test_episodes.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from launch.verify.layout_ranks import weights
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.parallel.layout import leave_layout
from pipeline.config.recipe import LearnerSection
from pipeline.data.batch import Batch
from precision.objectives.objective import Objective

Step = tuple[dict[str, float], NDArray[np.float32], NDArray[np.float32]]
"""Metrics, log-probabilities [responses], and the weights after the step."""


def steps(model: Path, objective: Objective, batches: Sequence[Batch], temperature: float) -> list[Step]:
    found = []
    for batch in batches:
        learner = MegatronLearner.create(
            model,
            LearnerSection(precision="fp32", step_deadline_s=240),
            objective,
            temperature=temperature,
            seed=0,
            total_steps=1,
        )
        advantages = (batch.reward - batch.reward[batch.first_rows].mean()).astype(np.float32)
        update = learner.update(batch, advantages, learner.score(batch))
        found.append((update.metrics, update.logprobs, weights(learner)))
        leave_layout()
    return found
