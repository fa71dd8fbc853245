"""Real learners and what they are fed: batches of random tokens that can be learned. Needs torch and Megatron-Core."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megatron_bridge.learner import MegatronLearner
from megatron_bridge.step.micro_batches import MicroBatch, Split, TokenRows, plan_micro_batches
from pipeline.config.recipe import LearnerSection
from pipeline.data.batch import Batch, LogprobContract, Response, given_batch
from precision.supervised import Supervised
from tests.support.learners import leave_world

CONTRACT = LogprobContract(temperature=1.0, top_p=1.0, top_k=-1, tokenizer_sha256="")
PROMPT_TOKENS = 8


def rows_of(vocabulary: int, count: int, length: int, seed: int) -> list[list[int]]:
    """Rows of random ids in which every second token follows from the one before: half of the loss can be learned."""
    draw = np.random.default_rng(seed)
    narrow = min(vocabulary, 512)  # few enough ids that some steps suffice
    heads = draw.integers(0, narrow, (count, (length + 1) // 2))
    rows = np.stack([heads, (heads * 7 + 3) % narrow], axis=2).reshape(count, -1)[:, :length]
    return [[int(token) for token in row] for row in rows]


def supervised_batch(vocabulary: int, count: int, length: int, seed: int) -> Batch:
    """Rows of `length` tokens, all but the first few to be predicted."""
    rows = rows_of(vocabulary, count, length, seed)
    groups = [(r[:PROMPT_TOKENS], [Response(r[PROMPT_TOKENS:], [0.0] * (length - PROMPT_TOKENS), 1.0)]) for r in rows]
    return given_batch(seed, groups, CONTRACT)


@contextmanager
def learner(
    model: Path, *, layers: str | None = None, total_steps: int = 100, **section: Any
) -> Iterator[MegatronLearner]:
    """One process on this device; `section` as in recipes, `layers` as MegatronLearner.create takes it."""
    chosen: dict[str, Any] = {} if layers is None else {"layers": layers}
    settings = LearnerSection.model_validate(section)
    try:
        yield MegatronLearner.create(
            model, settings, Supervised(), temperature=1.0, seed=0, total_steps=total_steps, **chosen
        )
    finally:
        leave_world()


def train_step(subject: MegatronLearner, batch: Batch) -> dict[str, float]:
    """One optimizer step of cross-entropy; its metrics."""
    return subject.update(batch, np.ones(batch.num_samples, np.float32), None).metrics


def one_micro_batch(subject: MegatronLearner, count: int, length: int) -> MicroBatch:
    """Rows of `length` tokens as one micro-batch on the host, every token but the prompts' to be predicted."""
    batch = supervised_batch(subject.model_config.vocab_size, count, length, seed=0)
    plan = plan_micro_batches(TokenRows.of_batch(batch), micro_batch_tokens=count * length, split=Split())
    (micro_batch,) = plan.micro_batches
    return micro_batch
