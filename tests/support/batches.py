"""Batches from rewards alone: responses of random length and content, for tests of what is computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from pipeline.advantages.compute import AdvantageComputer
from pipeline.data.batch import Batch, Completion, Group, LogprobContract, Prompt, Sample, Share
from pipeline.ports.learner import Update
from pipeline.trainer.batches import MiniBatch, mini_batches
from pipeline.trainer.loop import Trainer

CONTRACT = LogprobContract(temperature=1.0, top_p=1.0, top_k=-1, tokenizer_sha256="ab" * 32)


def read_by(batch: Batch, share: Share) -> Batch:
    """A batch that holds all, as the rank of `share` reads it."""
    own, held = np.repeat(share.held, batch.response_lengths), batch.select(share.held)
    numbers: dict[str, Any] = {
        name: np.where(own, getattr(batch, name), getattr(batch, name).dtype.type(0)) for name in batch.numbers
    }
    return replace(batch, share=share, tokens=held.tokens, kept=held.kept, experts=held.experts, **numbers)


def batch_of_rewards(
    rewards: Sequence[Sequence[float]],
    *,
    index: int = 0,
    seed: int = 0,
    unsampled: float = 0.0,
    vocabulary: int = 256,
    contract: LogprobContract = CONTRACT,
) -> Batch:
    """One group for each of `rewards`, of prompts of 2 to 5 tokens and answers of 1 to 9; of their tokens the share
    `unsampled` was not sampled (the first always was)."""
    random = np.random.default_rng(seed)

    def sample(reward: float) -> Sample:
        length = int(random.integers(1, 10))
        given = Completion.given(
            random.integers(0, vocabulary, length).tolist(), random.normal(-2.0, 0.5, length).tolist()
        )
        mask = np.append(True, random.random(length - 1) >= unsampled)
        return Sample(completion=replace(given, loss_mask=mask), reward=reward)

    groups = [
        Group(
            prompt=Prompt(
                group=number, text="", answer="", tokens=tuple(random.integers(0, vocabulary, random.integers(2, 6)))
            ),
            samples=tuple(sample(reward) for reward in group),
        )
        for number, group in enumerate(rewards)
    ]
    return Batch.from_groups(
        index, groups, contract=contract, dropped=(), next_group=len(groups), recipe_sha256="cd" * 32
    )


def parts_of(computer: AdvantageComputer, batch: Batch, count: int) -> list[MiniBatch]:
    """The mini-batches of a batch, with the advantages that `computer` gives it."""
    return mini_batches(computer, batch, computer.compute_advantages(batch), count)


def update_of(trainer: Trainer, batch: Batch) -> Update:
    """Have a trainer make its step on a batch, without publishing or saving; return what it would record."""
    found: list[Update] = []
    nothing: Any = SimpleNamespace(
        wait=lambda index, meanwhile: batch, advance=lambda *_, **__: None, after=lambda *_: {}, steps=-1
    )
    trainer.batches = trainer.checkpoints = trainer.schedule = nothing
    trainer.channel, trainer.checkpoint_every = None, batch.index + 2
    with patch.object(trainer, "_record", lambda batch, update, *_: found.append(update)):
        trainer._train_on(batch.index)
    return found[0]
