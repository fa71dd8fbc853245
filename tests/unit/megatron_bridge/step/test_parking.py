"""A learner that gives its memory away between updates learns as if it had not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.verify.layout_ranks import TEMPERATURE, make_batch
from launch.verify.layouts import write_model
from megatron_bridge.learner import MegatronLearner
from pipeline.config.recipe import LearnerSection, OptimizerSection
from precision.objectives.p3o import P3O
from tests.support.learners import learner_here

STEPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parking") / "model"
    write_model(folder, experts=False)
    return folder


def trained(model: Path, parks: bool, **learner: Any) -> tuple[list[float], list[torch.Tensor], list[int]]:
    """Losses and gradient norms, the final weights, and the bytes that each parking freed."""
    section = LearnerSection(micro_batch_tokens=192, optimizer=OptimizerSection(lr=1e-3, warmup_steps=0), **learner)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    found, freed = list[float](), list[int]()
    with learner_here(model, section, P3O(), temperature=TEMPERATURE, seed=0, total_steps=STEPS) as one:
        for step in range(STEPS):
            batch = make_batch(step, vocabulary)
            scored = one.score(batch)
            metrics = one.update(batch, batch.reward, scored, old_logprobs=scored).metrics
            found += [metrics["loss"], metrics["grad_norm"]]
            if parks:
                freed.append(one.parking.park())
                assert one.parking.park() == 0, "nothing is left to park"
                assert torch.isfinite(one.score(batch)).all(), "parameters stay where they are"
                assert state_bytes(one) < 0.01 * freed[-1], "the smallest norms stay"
                one.parking.unpark()
                one.parking.unpark()
        weights = [parameter.detach().clone() for chunk in one.model for parameter in chunk.parameters()]
    return found, weights, freed


def state_bytes(learner: MegatronLearner) -> int:
    """Bytes of gradients and moments."""
    tensors = [buffer.grad_data for chunk in learner.model for buffer in chunk.buffers]
    for part in learner.optimizer.chained_optimizers:
        tensors += [one for state in part.optimizer.state.values() for one in state.values() if one.dim()]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize(
    ("learner", "bytes_each"),
    [
        (dict(precision="fp32"), 4 + 8),
        (dict(precision="bf16"), 4 + 12),
        (dict(precision="bf16", distributed_optimizer=False), 4 + 12),
    ],
)
def test_what_a_learner_parks_comes_back_bit_for_bit(model: Path, learner: dict[str, Any], bytes_each: int) -> None:
    """Freed are float32 gradients, moments and, in BF16, the main weights."""
    losses, weights, freed = trained(model, parks=True, **learner)
    expected, same, _ = trained(model, parks=False, **learner)
    assert losses == expected
    assert all(torch.equal(one, other) for one, other in zip(weights, same, strict=True))
    parameters = sum(one.numel() for one in weights)
    assert freed == [pytest.approx(bytes_each * parameters, rel=0.02)] * STEPS
