"""The trainer's loop on recorded batches with everything that a batch may hold, in one layout; see test_shares.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from launch.build.components import build_objective
from launch.verify.layout_ranks import CONTRACT, random_experts, weights
from launch.verify.layouts import section
from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.parallel.layout import Layout, initialize, leave_layout
from pipeline.data.batch import Batch, Response, given_batch
from pipeline.data.store import BatchStore
from tests.support.files import CountedFile
from tests.support.learners import trainer_on
from tests.support.runs import a_recipe

CASES: dict[str, dict[str, Any]] = {
    "p3o": dict(objective=dict(name="p3o")),
    "staged": dict(
        objective=dict(name="mu_grpo"),
        schedule=dict(kind="staged", updates_per_stage=2),
        advantage=dict(name="grpo", zero_variance="skip"),
    ),
    "several": dict(
        objective=dict(name="clipped", anchor="old", clip_low=0.01, clip_high=0.01),
        learner=dict(updates_per_batch=2),
        advantage=dict(name="grpo", zero_variance="exclude"),
    ),
}


def measure(folder: Path, name: str, case: str, steps: int) -> dict[str, Any]:
    """Of this rank: the bytes that it has read of batch files, what it held of the last batch, and how far each weight
    has moved."""
    recipe = a_recipe(run=dict(steps=steps), **CASES[case])
    learning = section(name).model_copy(update=dict(micro_batch_tokens=4096))
    initialize(Layout.of(learning), seed=0, deadline_s=240)
    objective, updates = build_objective(recipe), recipe.learner.updates_per_batch
    learner = MegatronLearner(
        folder / "model", learning, objective, temperature=CONTRACT.temperature, total_steps=steps * updates
    )
    before, seen, store = weights(learner), [], BatchStore(folder / "batches")
    contract = store.read(0, None).contract
    trainer = trainer_on(folder / f"{name} {case}", recipe, learner, store, contract=contract, every=steps)

    def noted(batch: Batch, *arguments: Any, **named: Any) -> Any:
        seen.append(batch)
        return update(batch, *arguments, **named)

    update = learner.update
    with (
        patch.object(learner, "update", noted),
        patch("pipeline.data.zarr_zip.open_regular", lambda path: CountedFile(path.open("rb", buffering=0))),
    ):
        trainer.train()
    change = weights(learner) - before
    leave_layout()
    return dict(
        read=CountedFile.num_bytes,
        change=change,
        tokens=sum(len(batch.tokens) for batch in seen),
        routes=sum(batch.experts.ids.nbytes for batch in seen if batch.experts is not None),
        kept=sum(len(batch.kept.tokens) for batch in seen if batch.kept is not None),
        share=None if seen[-1].share is None else seen[-1].share.held,
    )


def large_batch(model: ModelConfig, *, samples: int, longest: int) -> Batch:
    """Rows of uneven length, in groups of four, with the routes of a mixture."""
    draw, vocabulary = np.random.default_rng(0), model.vocab_size

    def response() -> Response:
        length = int(draw.integers(longest // 4, longest))
        logprobs = draw.normal(-np.log(vocabulary), 0.3, length).tolist()
        return Response(draw.integers(0, vocabulary, length).tolist(), logprobs, float(draw.normal()))

    groups = [(draw.integers(0, vocabulary, 8).tolist(), [response() for _ in range(4)]) for _ in range(samples // 4)]
    batch = given_batch(0, groups, CONTRACT)
    return replace(batch, experts=random_experts(batch, model, seed=0, unknown=0.1))
