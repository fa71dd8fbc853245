"""The mismatch statistics of a real optimizer step in a layout, beside those of brute force and of sums over ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from launch.verify.layout_ranks import make_batch
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.parallel.layout import Layout, initialize, leave_layout
from megatron_bridge.step.micro_batches import TokenRows
from pipeline.config.recipe import LearnerSection, parse_layout
from pipeline.data.batch import Batch
from precision.mismatch.statistics import GROUPS, GroupSums, Mismatch, Ranks, StepTokens
from precision.objectives.p3o import P3O
from tests.support import mismatch_reference as reference


def compare(folder: Path, layouts: list[str]) -> list[dict[str, float]]:
    """For each layout, the largest absolute differences of what the learner measured."""
    return [in_layout(folder, layout) for layout in layouts]


def in_layout(folder: Path, layout: str) -> dict[str, float]:
    section = LearnerSection(**parse_layout(layout), precision="fp32", micro_batch_tokens=64)
    initialize(Layout.of(section), seed=0, deadline_s=240)
    learner = MegatronLearner(folder, section, P3O(), temperature=1.0, total_steps=1)
    batch = aged_batch(learner.model_config.vocab_size)
    advantages = np.sign(batch.reward) * (np.abs(batch.reward) > 0.3)
    captured: list[StepTokens] = []

    def of_step(tokens: StepTokens, ranks: Ranks) -> Mismatch:
        captured.append(tokens)
        return Mismatch.of_step(tokens, ranks)

    several_chunks = patch("precision.mismatch.statistics.CHUNK_TOKENS", 40)
    with several_chunks, patch("megatron_bridge.learner.Mismatch", of_step=of_step):
        update = learner.update(batch, advantages.astype(np.float32), learner.logprobs(batch))
    assert update.mismatch is not None
    (tokens,) = captured
    found = {
        "micro_batches": float(len(learner._plan(TokenRows.of_batch(batch)).micro_batches)),
        "brute_force": against_brute_force(update.mismatch, tokens),
        "sharded": against_shards(update.mismatch, tokens, learner, batch),
        "groups": float((update.mismatch.sums[0, :, 0] > 0).sum()),
    }
    np.testing.assert_array_equal(tokens.learner_logprobs.numpy(), update.logprobs)
    leave_layout()
    return found


def aged_batch(vocabulary: int) -> Batch:
    """Tokens of several versions, some of which no engine sampled."""
    batch, random = make_batch(0, vocabulary), np.random.default_rng(0)
    age = np.sort(random.integers(0, 7, batch.num_response_tokens))[::-1].astype(np.int32)
    sampled = random.random(batch.num_response_tokens) > 0.1
    return replace(
        batch,
        index=9,
        policy_version=9 - age,
        loss_mask=sampled,
        rollout_logprobs=np.where(sampled, batch.rollout_logprobs, 0.0).astype(np.float32),
    )


def against_brute_force(mismatch: Mismatch, tokens: StepTokens) -> float:
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


def against_shards(mismatch: Mismatch, tokens: StepTokens, learner: MegatronLearner, batch: Batch) -> float:
    """Sums over the tokens of each micro-batch of this rank alone, then over the data and context parallel ranks."""
    added = GroupSums.zero()
    for micro_batch in learner._plan(TokenRows.of_batch(batch)).micro_batches:
        mine = torch.zeros(len(tokens.seen), dtype=torch.bool)
        micro_batch.gather_into(mine, torch.ones_like(micro_batch.mask))
        part = replace(tokens, seen=tokens.seen & mine)
        sides: tuple[Any, ...] = (part.learner_logprobs.double(), part.rollout_logprobs.double())
        added += GroupSums.from_tokens(*(side[part.seen] for side in sides), part.buckets())
    for tensor in (added.sums, added.histogram):
        dist.all_reduce(tensor, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    assert added.sums.shape[0] == len(GROUPS)
    np.testing.assert_array_equal(added.histogram.numpy(), mismatch.histogram[0])
    whole = mismatch.sums[0]
    return float(np.max(np.abs(added.sums.numpy() - whole) / np.maximum(1.0, np.abs(whole))))
