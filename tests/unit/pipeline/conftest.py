"""Batches to store, audit and print."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pipeline.data.batch import Batch, Completion, DroppedGroup, Group, LogprobContract, Prompt, Sample

CONTRACT = LogprobContract(temperature=0.7, top_p=0.95, top_k=-1, tokenizer_sha256="ab" * 32)


def make(
    index: int = 0,
    *,
    first_group: int = 0,
    num_groups: int = 2,
    dropped: tuple[int, ...] = (),
    next_group: int | None = None,
    versions: tuple[int, ...] = (0, 0, 0),
    open_groups: tuple[int, ...] = (),
    aborted: bool = False,
) -> Batch:
    """`num_groups` groups of three samples; one of the three has reward parts. With `aborted` one ended
    before its first token, which is not committed."""

    def sample(group: int, member: int) -> Sample:
        length = (len(versions), 0 if aborted else 1, 1)[member]
        return Sample(
            completion=Completion(
                tokens=7 + group + np.arange(length, dtype=np.int32),
                logprobs=-0.5 * np.arange(1, length + 1, dtype=np.float32),
                versions=np.array(versions[:length], np.int32),
                loss_mask=np.ones(length, np.bool_),
                finish=("stop", "abort" if aborted else "stop", "length")[member],  # type: ignore[arg-type]
                engine=member,
                queued_s=0.25,
                generated_s=1.5,
            ),
            reward=float(member == 0),
            reward_parts={"format": 0.5, "odd/name ü": 1.0} if member == 2 else {},
        )

    groups = [
        Group(
            prompt=Prompt(group=g, text=f"{g}=", answer=str(g), tokens=(1, 2 + g)),
            samples=tuple(sample(g, member) for member in range(3)),
        )
        for g in range(first_group, first_group + num_groups)
    ]
    after = first_group + num_groups + len(dropped)
    return Batch.from_groups(
        index,
        groups,
        contract=CONTRACT,
        dropped=[DroppedGroup(group=group, reason="too long") for group in dropped],
        next_group=after if next_group is None else next_group,
        recipe_sha256="cd" * 32,
        open_groups=open_groups,
    )


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., Batch]:
    return make


@pytest.fixture(scope="session")
def contract() -> LogprobContract:
    return CONTRACT


@pytest.fixture
def count_listings(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each folder was listed."""
    counts: Counter[str] = Counter()
    for listing in (os.listdir, os.scandir):

        def counted(path: Any = ".", listing: Callable[[Any], Any] = listing) -> Any:
            counts[os.fspath(path)] += 1
            return listing(path)

        monkeypatch.setattr(os, listing.__name__, counted)
    return counts
