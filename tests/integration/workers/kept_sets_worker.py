"""One training step on a batch with kept sets, in every layout of one size, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from launch.verify.layout_ranks import TEMPERATURE, make_batch, weights
from launch.verify.layouts import section
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.parallel.layout import Layout, initialize, leave_layout
from pipeline.data.batch import Batch, KeptSets
from precision.objectives.p3o import P3O


def batch_with_kept_sets(vocabulary: int) -> Batch:
    """Each token in a set of up to 30; every ninth was not sampled and has none."""
    batch, random = make_batch(0, vocabulary), np.random.default_rng(1)
    sampled = np.arange(batch.num_response_tokens) % 9 != 8
    sets = [
        sorted({token, *random.integers(0, vocabulary, random.integers(0, 30)).tolist()}) if was else []
        for token, was in zip(batch.response_tokens.tolist(), sampled, strict=True)
    ]
    noise = random.normal(0.0, 0.3, len(sets))
    logprobs = np.array([noise[i] - np.log(len(one)) if one else 0.0 for i, one in enumerate(sets)], np.float32)
    return replace(
        batch,
        kept=KeptSets.of(sets),
        loss_mask=sampled,
        rollout_logprobs=logprobs,
        contract=replace(batch.contract, top_p=0.8, kept_set=True),
    )


def measure(model: Path, layouts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """layout → logprobs [responses], the metrics of the step, and the change of every weight."""
    found = {}
    for name in layouts:
        learning = section(name)
        initialize(Layout.of(learning), seed=0, deadline_s=240)
        learner = MegatronLearner(model, learning, P3O(), temperature=TEMPERATURE, total_steps=3)
        batch, before = batch_with_kept_sets(learner.model_config.vocab_size), weights(learner)
        scored = learner.logprobs(batch)
        update = learner.update(batch, (batch.reward - batch.reward.mean()).astype(np.float32), scored)
        found[name] = dict(logprobs=scored, trained=update.logprobs, metrics=update.metrics)
        found[name]["weight_change"] = weights(learner) - before
        # What a row of the same length without sets gives: the next micro-batch must not find old sets.
        found[name]["whole"] = np.concatenate(learner.score_tokens([batch.sample_tokens(0).tolist()]))
        leave_layout()
    return found
