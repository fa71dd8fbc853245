"""One step of every objective in each layout that so many processes can hold; see test_objectives.py."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from launch.build.components import build_objective
from launch.verify.layout_ranks import make_batch, weights
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.parallel.layout import Layout, initialize, leave_layout
from megatron_bridge.step.host_weights import ReferencePolicy
from pipeline.config.recipe import LearnerSection, OptimizerSection, parse_layout
from pipeline.data.batch import Batch
from tests.support.runs import a_recipe

OLD_ANCHOR = dict(name="clipped", anchor="old")
OBJECTIVES: dict[str, dict[str, Any]] = {
    "p3o": dict(objective=dict(name="p3o")),
    "p3o sequence": dict(objective=dict(name="p3o", ess_unit="sequence", kl_estimator="importance")),
    "split": dict(objective=dict(name="split")),
    "p4o": dict(objective=dict(name="p4o")),
    "clipped": dict(objective=dict(name="clipped", dual_clip=3.0)),
    "cispo": dict(objective=dict(name="cispo")),
    "gspo": dict(objective=dict(name="gspo", clip_low=0.2, clip_high=0.2)),
    "mu_grpo": dict(objective=dict(name="mu_grpo", kappa=0.7)),
    "decoupled": dict(objective=dict(name="decoupled")),
    "m2po": dict(objective=dict(name="m2po")),
    "dppo_tv": dict(objective=dict(name="dppo_tv")),
    "topr": dict(objective=dict(name="topr")),
    "tis": dict(objective=OLD_ANCHOR, correction=dict(name="tis")),
    "mis": dict(objective=OLD_ANCHOR, correction=dict(name="mis", level="geometric", veto=0.2, normalized=True)),
    "rejection": dict(objective=OLD_ANCHOR, correction=dict(name="rejection", low=0.01, high=100.0)),
    "icepop": dict(objective=dict(name="gspo", anchor="old"), correction=dict(name="icepop")),
    "opsm": dict(objective=dict(name="cispo"), correction=dict(name="opsm")),
    "near k3": dict(objective=dict(name="cispo"), reference=dict(coefficient=0.3)),
    "near importance": dict(objective=OLD_ANCHOR, reference=dict(coefficient=0.3, estimator="importance")),
}
LEFT_OUT = ("cispo", "gspo", "tis")
"""Stepped again with a quarter of the samples left out, and with advantage 0 for those but not left out."""


def batch_with_unsampled_tokens(vocabulary: int) -> Batch:
    """Two tokens of every fifth response were not sampled; what stands there must not matter, -120 least of all."""
    batch = make_batch(0, vocabulary)
    unsampled = np.zeros(batch.num_response_tokens, np.bool_)
    for sample in range(0, batch.num_samples, 5):
        middle = (batch.response_offsets[sample] + batch.response_offsets[sample + 1]) // 2
        unsampled[middle : middle + 2] = True
    rollout_logprobs = np.where(unsampled, np.float32(-120.0), batch.rollout_logprobs)
    return dataclasses.replace(batch, loss_mask=~unsampled, rollout_logprobs=rollout_logprobs)


def step(folder: Path, section: LearnerSection, name: str, variant: str) -> tuple[dict[str, float], Any]:
    made = a_recipe(**OBJECTIVES[name])
    objective = build_objective(made)
    learner = MegatronLearner(folder / "model", section, objective, temperature=0.9, total_steps=1)
    batch = batch_with_unsampled_tokens(learner.model_config.vocab_size)
    before = weights(learner)
    if made.reference is not None:
        reference = ReferencePolicy(learner, folder / "reference")
        batch = dataclasses.replace(batch, reference_logprobs=reference.logprobs(batch))
        assert np.array_equal(weights(learner), before), "the policy is back"
    scored = learner.logprobs(batch)
    random = np.random.default_rng(1)
    old_logprobs = (scored + random.normal(0, 0.2, len(scored))).astype(np.float32)
    advantages = (batch.reward - batch.reward.mean()).astype(np.float32)
    chosen = np.arange(batch.num_samples) % 4 != 1
    if variant:
        advantages = np.where(chosen, advantages, 0.0).astype(np.float32)
    trained = chosen if variant == " left out" else None
    update = learner.update(batch, advantages, scored, old_logprobs=old_logprobs, trained=trained)
    known = np.isfinite(update.logprobs[batch.loss_mask])
    seen = batch.loss_mask if trained is None else batch.loss_mask & np.repeat(trained, batch.response_lengths)
    ratios = np.exp(update.logprobs[seen].astype(np.float64) - batch.rollout_logprobs[seen])
    by_hand = dict(known_logprobs=float(known.mean()), weight_by_hand=float(np.minimum(ratios, 5.0).mean()))
    return {**update.metrics, **by_hand}, weights(learner) - before


def measure(folder: Path, layouts: list[str]) -> None:
    """Write LAYOUT.npz: one row of metrics and one change of the weights for each objective."""
    for layout in layouts:
        base = LearnerSection(
            precision="fp32",
            micro_batch_tokens=48,
            step_deadline_s=240,
            # Adam divides by the gradient's own size: a small eps would blow rounding differences up to whole steps.
            optimizer=OptimizerSection(lr=1e-3, warmup_steps=0, eps=1e-4),
        )
        section = base.model_copy(update=parse_layout(layout))
        initialize(Layout.of(section), seed=0, deadline_s=240)
        metrics: dict[str, dict[str, float]] = {}
        changes: dict[str, NDArray[np.float64]] = {}
        for name in OBJECTIVES:
            for variant in ("", " left out", " zeros") if name in LEFT_OUT else ("",):
                metrics[name + variant], changes[name + variant] = step(folder, section, name, variant)
        if torch.distributed.get_rank() == 0:
            (folder / f"{layout}.json").write_text(json.dumps(metrics))
            np.savez(folder / f"{layout}.npz", **changes)  # type: ignore[arg-type]
        leave_layout()
