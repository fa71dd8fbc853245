"""Batches from rewards alone: responses of random length and content, for tests of what is computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from pipeline.advantages.compute import AdvantageComputer
from pipeline.data.batch import (
    Batch,
    Completion,
    EpisodeFacts,
    Group,
    LogprobContract,
    Prompt,
    Row,
    Sample,
    Share,
    StopReason,
    TokenKind,
)
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


def episode(
    turns: Sequence[Sequence[int]],
    given: Sequence[Sequence[int]],
    *,
    prompt: Sequence[int],
    fork: int | None = None,
    logprobs: Sequence[Sequence[float]] | None = None,
    facts: EpisodeFacts | None = None,
    reward: float = 0.0,
) -> Sample:
    """An episode of `turns` with tool output `given` between them (one less). With `fork` the rest from that turn on is
    a row of its own, which repeats all that was before it: the same sampled tokens, in the same order. Version i has
    sampled turn i."""

    def row(first: int, end: int) -> Row:
        """The row that trains the turns `first` to `end` - 1."""
        before = [*prompt, *chain.from_iterable((*turns[i], *given[i]) for i in range(first))]
        parts: list[tuple[Sequence[int], TokenKind, Sequence[float], int]] = []
        for turn in range(first, end):
            said = [-1.0] * len(turns[turn]) if logprobs is None else logprobs[turn]
            parts.append((turns[turn], TokenKind.SAMPLED, said, turn))
            if turn + 1 < end:
                parts.append((given[turn], TokenKind.TOOL, [0.0] * len(given[turn]), turn))
        kinds = np.concatenate([np.full(len(ids), kind, np.uint8) for ids, kind, _, _ in parts])
        flat = Completion.given(
            [*chain.from_iterable(part[0] for part in parts)], [*chain.from_iterable(part[2] for part in parts)]
        )
        completion = replace(
            flat,
            loss_mask=kinds == TokenKind.SAMPLED,
            kinds=kinds,
            versions=np.concatenate([np.full(len(ids), turn, np.int32) for ids, _, _, turn in parts]),
        )
        return Row(prompt=tuple(before), completion=completion)

    rows = [row(0, len(turns))]
    if fork is not None:
        rows = [row(0, fork), row(fork, len(turns))]
        shared = len(rows[0].prompt) + len(rows[0].completion.tokens)
        rows[1] = replace(rows[1], branch_of=0, branched_at=shared)
    facts = facts or EpisodeFacts(stopped=StopReason.FINISHED, turns=len(turns))
    return Sample.of_episode(rows, facts, reward, {})


def batch_of_episodes(
    rewards: Sequence[Sequence[float]],
    *,
    forked: bool = False,
    index: int = 0,
    seed: int = 0,
    vocabulary: int = 256,
    contract: LogprobContract = CONTRACT,
) -> Batch:
    """One group for each of `rewards`, of episodes of 1 to 4 turns of 1 to 5 tokens each; `forked`: the same sampled
    tokens, but each episode of more than one turn in two rows."""
    random = np.random.default_rng(seed)

    def ids(most: int) -> list[int]:
        return random.integers(0, vocabulary, random.integers(1, most + 1)).tolist()

    groups = []
    for number, group in enumerate(rewards):
        prompt, samples = tuple(ids(5)), []
        for reward in group:
            turns = [ids(5) for _ in range(random.integers(1, 5))]
            given = [ids(4) for _ in turns[1:]]
            logprobs = [random.normal(-2.0, 0.5, len(turn)).clip(max=0.0).tolist() for turn in turns]
            fork = int(random.integers(1, max(2, len(turns))))
            reason = StopReason(int(random.integers(0, 3)))
            samples.append(
                episode(
                    turns,
                    given,
                    prompt=prompt,
                    fork=fork if forked and len(turns) > 1 else None,
                    logprobs=logprobs,
                    facts=EpisodeFacts(stopped=reason, turns=len(turns), tool_calls=len(given), tool_s=0.5),
                    reward=reward,
                )
            )
        asked = Prompt(group=number, text="", answer="", tokens=prompt, problem=number % 3)
        groups.append(Group(prompt=asked, samples=tuple(samples)))
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
