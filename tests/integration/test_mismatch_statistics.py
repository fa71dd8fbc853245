"""Statistics of a real optimizer step on real ranks are those of brute force, in every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from launch.verify.layout_ranks import make_batch
from launch.verify.layouts import write_model
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.parallel.layout import Layout, initialize, leave_layout
from megatron_bridge.step.micro_batches import TokenRows
from pipeline.config.recipe import LearnerSection, parse_layout
from precision.mismatch.statistics import Mismatch, Ranks, StepTokens
from precision.objectives.p3o import P3O
from tests.support import mismatch_reference as reference
from tests.support.ranks import run_ranks

LAYOUTS = ["DP2", "TP2", "CP2"]


def measure(folder: Path) -> list[dict[str, float]]:
    """Of each layout, the largest difference from brute force, of a batch whose tokens are of several versions and in
    part of no engine."""
    found = []
    for layout in LAYOUTS:
        section = LearnerSection(**parse_layout(layout), precision="fp32", micro_batch_tokens=64)
        initialize(Layout.of(section), seed=0, deadline_s=240)
        learner = MegatronLearner(folder, section, P3O(), temperature=1.0, total_steps=1)
        batch, random = make_batch(0, learner.model_config.vocab_size), np.random.default_rng(0)
        age = np.sort(random.integers(0, 7, batch.num_response_tokens))[::-1].astype(np.int32)
        sampled = random.random(batch.num_response_tokens) > 0.1
        rollout = np.where(sampled, batch.rollout_logprobs, 0.0).astype(np.float32)
        batch = replace(batch, index=9, policy_version=9 - age, loss_mask=sampled, rollout_logprobs=rollout)
        advantages = np.sign(batch.reward) * (np.abs(batch.reward) > 0.3)
        captured: list[StepTokens] = []

        def of_step(tokens: StepTokens, ranks: Ranks, captured: list[StepTokens] = captured) -> Mismatch:
            captured.append(tokens)
            return Mismatch.of_step(tokens, ranks)

        several_chunks = patch("precision.mismatch.statistics.CHUNK_TOKENS", 40)
        with several_chunks, patch("megatron_bridge.learner.Mismatch", of_step=of_step):
            update = learner.update(batch, advantages.astype(np.float32), learner.logprobs(batch))
        assert update.mismatch is not None
        np.testing.assert_array_equal(captured[0].learner_logprobs.numpy(), update.logprobs)
        found.append(
            dict(
                micro_batches=float(len(learner._plan(TokenRows.of_batch(batch)).micro_batches)),
                groups=float((update.mismatch.sums[0, :, 0] > 0).sum()),
                error=largest_error(update.mismatch, captured[0]),
            )
        )
        leave_layout()
    return found


def largest_error(mismatch: Mismatch, tokens: StepTokens) -> float:
    names, table = mismatch.table()
    learner, rollout = tokens.learner_logprobs.numpy(), tokens.rollout_logprobs.numpy()
    errors = [0.0]
    for row, mask in enumerate(reference.masks(tokens).values()):
        if mask.sum() > 1:
            expected = reference.statistics(learner[mask], rollout[mask])
            pairs = [(table[0, row, place], expected[name]) for place, name in enumerate(names)]
            pairs += zip(mismatch.quantiles[0, row], reference.quantiles(learner[mask], rollout[mask]), strict=True)
            errors += [abs(ours - theirs) / max(1.0, abs(theirs)) for ours, theirs in pairs]
    return float(np.max(errors))  # max() of Python passes over NaN


@pytest.mark.slow
def test_statistics_are_exact_in_every_layout(tmp_path: Path) -> None:
    write_model(tmp_path / "model", experts=False)
    for rank in run_ranks(2, measure, tmp_path / "model"):
        for layout, found in zip(LAYOUTS, rank, strict=True):
            assert found["micro_batches"] > 1, layout
            assert found["groups"] > 10, layout
            assert found["error"] == pytest.approx(0.0, abs=1e-9), layout
