"""What a learner takes from a checkpoint of another recipe, and what it leaves there."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from launch.verify.layout_ranks import TEMPERATURE, train
from launch.verify.layouts import write_model
from megatron_bridge.learner import MegatronLearner
from pipeline.config.recipe import LearnerSection, OptimizerSection
from precision.objectives.p3o import P3O
from tests.support.learners import learner_here

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning", "UserWarning")
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "dense"
    write_model(folder, experts=False)
    return folder


def learner(model: Path, distributed: bool = True, **optimizer: Any) -> AbstractContextManager[MegatronLearner]:
    section = LearnerSection(
        precision="fp32",
        micro_batch_tokens=256,
        distributed_optimizer=distributed,
        optimizer=OptimizerSection(lr=1e-3, warmup_steps=0, **optimizer),
    )
    return learner_here(model, section, P3O(), temperature=TEMPERATURE, seed=0, total_steps=4)


@pytest.mark.parametrize("distributed", [True, False])
def test_the_optimizer_goes_by_the_recipe_and_not_by_the_checkpoint(
    model: Path, tmp_path: Path, distributed: bool
) -> None:
    """A fork may change betas and eps; Megatron loads those that were saved."""
    with learner(model, distributed, betas=(0.5, 0.6), eps=1e-3) as before:
        train(before, 0)
        before.save(tmp_path / "saved")
    with learner(model, distributed, betas=(0.8, 0.9), eps=1e-6) as fork:
        fork.load(tmp_path / "saved")
        train(fork, 1)
        used = {(tuple(group["betas"]), group["eps"]) for group in fork.optimizer.param_groups}
    assert used == {((0.8, 0.9), 1e-6)}
