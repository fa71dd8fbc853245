"""A learner that is left leaves no threads and no descriptors behind in the test's process."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from pipeline.config.recipe import LearnerSection

# Megatron-Core calls much of itself and of torch deprecated.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning", "UserWarning")
]


def test_a_mixture_that_was_trained_goes(tmp_path: Path) -> None:
    from launch.verify.layouts import write_model

    write_model(tmp_path / "experts", experts=True)
    left = []
    for _ in range(3):
        _train_one(tmp_path / "experts")
        gc.collect()
        left.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    threads, descriptors = left[2][0] - left[0][0], left[2][1] - left[0][1]
    assert threads <= 2 * 8, "of the fifty of a learner, those of two groups stay: Megatron has forgotten them"
    assert descriptors <= 2 * 10


def _train_one(model: Path) -> None:
    from launch.verify.layout_ranks import TEMPERATURE, train
    from precision.supervised import Supervised
    from tests.support.learners import learner_here

    with learner_here(
        model, LearnerSection(precision="fp32"), Supervised(), temperature=TEMPERATURE, seed=0, total_steps=1
    ) as made:
        train(made, 0)
