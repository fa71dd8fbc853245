"""Batches that no engine sampled: demonstrations, and made-up rows by which learners are compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pipeline.data.records import Batch, Completion, Group, LogprobContract, Prompt, Sample


class Response(NamedTuple):
    """One answer to a prompt."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    """Natural log, one for each token; it stands where the engine's would."""
    reward: float
    learned: Sequence[bool] | None = None
    """One for each token: False where nothing is learned from it. Default: all are."""


def given_batch(
    index: int, groups: Iterable[tuple[Sequence[int], Sequence[Response]]], contract: LogprobContract
) -> Batch:
    """Batch `index` of (prompt tokens, responses), as if sampled with version `index`. Groups are numbered from 0.

    Its log-probabilities are over the whole vocabulary, whatever the contract says of kept sets: nothing was cut."""
    contract = replace(contract, kept_set=False)
    built = [
        Group(
            prompt=Prompt(group=number, text="", answer="", tokens=tuple(prompt)),
            samples=tuple(Sample(completion=_completion(one, index), reward=one.reward) for one in responses),
        )
        for number, (prompt, responses) in enumerate(groups)
    ]
    return Batch.from_groups(index, built, contract=contract, dropped=(), next_group=len(built), recipe_sha256="")


def _completion(one: Response, index: int) -> Completion:
    made = Completion.given(one.tokens, one.logprobs, index)
    return made if one.learned is None else replace(made, loss_mask=np.array(one.learned, np.bool_))
