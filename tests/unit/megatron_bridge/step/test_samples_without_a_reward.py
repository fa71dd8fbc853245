"""A real learner learns the same whether a sample has no reward or was never there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.verify.layout_ranks import TEMPERATURE, make_batch
from launch.verify.layouts import write_model
from pipeline.advantages.compute import AdvantageComputer
from pipeline.advantages.methods import DrGRPO
from pipeline.config.recipe import LearnerSection, OptimizerSection
from pipeline.data.batch import Batch
from precision.objectives.p3o import P3O
from tests.support.batches import parts_of
from tests.support.learners import learner_here


def failed(batch: Batch, samples: np.ndarray[Any, Any]) -> Batch:
    """As the collector stores it when the verifier failed on these samples."""
    learned = np.repeat(~samples, batch.response_lengths)
    return replace(
        batch,
        reward=np.where(samples, 0.0, batch.reward).astype(np.float32),
        reward_parts={"verifier_failed": np.where(samples, 1.0, np.nan).astype(np.float32)},
        loss_mask=batch.loss_mask & learned,
        rollout_logprobs=np.where(learned, batch.rollout_logprobs, 0.0).astype(np.float32),
    )


def metrics(model: Path, batch: Batch) -> dict[str, float]:
    section = LearnerSection(
        precision="fp32", micro_batch_tokens=192, optimizer=OptimizerSection(lr=1e-3, warmup_steps=0)
    )
    settings = DrGRPO.model_validate(dict(aggregation="token"))
    computer = AdvantageComputer(section=settings, estimator=settings.estimator(), max_new_tokens=9)
    with learner_here(model, section, P3O(), temperature=TEMPERATURE, seed=0, total_steps=2) as learner:
        [part] = parts_of(computer, batch, 1)
        scored = learner.score(part.batch)
        return learner.update(part.batch, part.advantages, scored, old_logprobs=scored, trained=part.trained).metrics


def test_a_step_is_the_same_without_the_sample(tmp_path: Path) -> None:
    write_model(tmp_path / "model", experts=False)
    batch = make_batch(0, json.loads((tmp_path / "model/config.json").read_text())["vocab_size"])
    without = np.zeros(batch.num_samples, np.bool_)
    without[0] = True
    masked, fewer = (metrics(tmp_path / "model", b) for b in (failed(batch, without), batch.select(~without)))
    plain = metrics(tmp_path / "model", batch)
    for name in ("loss", "grad_norm", "ess", "num_tokens"):
        assert masked[name] == pytest.approx(fewer[name], rel=1e-5, abs=1e-7), name
    assert plain["grad_norm"] != pytest.approx(fewer["grad_norm"], rel=1e-3), "the sample matters"
