"""What the batches of a run of episodes must hold, whatever was killed: each episode whole, and once.

`evenkeel verify history` counts groups. Here turns are counted: the environment and the agents of these runs answer
with the number of a turn and the first digits in it, so that a batch itself tells which turns they were given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.batch import Batch, StopReason, TokenKind, turns_of
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.tasks.tokenizer import Tokenizer
from tests.chaos.kills.plan import STUCK

TURNS = 3
"""Of a finished episode with an environment or an agent."""


def faults(run: Path, model: Path, section: Mapping[str, Any], details: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the episodes of a finished run, and fill in `details` with counts."""
    stuck_ones = any(section.items() >= one.items() for one in STUCK.values())
    tokenizer, counts = Tokenizer.load(model), Counter[str]()
    recipe = RunDirectory(run).recipe()
    store, seen, given_up = BatchStore(run / "batches"), set[bytes](), list[str]()
    for index in sorted(store.settled()):
        batch = store.read(index, None)
        assert batch.episodes is not None
        groups = len(set(batch.group.tolist())) + len(batch.dropped)
        if groups != recipe.rollout.prompts_per_batch:
            yield f"batch {index} has {groups} groups, expected {recipe.rollout.prompts_per_batch}"
        attempts = np.unique(batch.group[batch.first_rows], return_counts=True)[1]
        if set(attempts) != {recipe.rollout.group_size}:
            yield f"batch {index} has groups of {set(attempts)} episodes"
        stuck = [drop for drop in batch.dropped if "took more than" in drop.reason or "without a turn" in drop.reason]
        counts += Counter(groups=groups, stuck=len(stuck))
        given_up += [drop.reason for drop in batch.dropped if drop not in stuck]
        for row in range(batch.num_samples):
            key = _row(batch, row)
            if key in seen:
                yield f"batch {index}, row {row} is trained twice"
            seen.add(key)
        for episode, first in enumerate(batch.first_rows.tolist()):
            stopped = StopReason(int(batch.episodes.stopped[first]))
            turns = int(batch.episodes.turns[batch.episode == episode].sum())
            counts += Counter(episodes=1, turns=turns) + Counter({f"stopped {stopped.name.lower()}": 1})
            if "tools" not in section and stopped is StopReason.FINISHED and turns != TURNS:
                yield f"batch {index}, episode {episode} has {turns} turns, expected {TURNS}"
        if "agent" not in section and "tools" not in section:
            for row in range(batch.num_samples):
                if (said := _conversation(batch, row, tokenizer)) is not None:
                    yield f"batch {index}, row {row}: {said}"
                start = tokenizer.decode(_prompt(batch, row)).removeprefix("#0").lstrip(">")
                if start.startswith("9") and stuck_ones:
                    yield f"batch {index}, row {row} has a prompt whose episodes never end: {start}"
    details |= counts | dict(given_up=given_up)


def _row(batch: Batch, row: int) -> bytes:
    """Return what no two rows share: their tokens with log-probabilities, and how long they waited."""
    tokens = slice(*batch.sample_offsets[row : row + 2])
    responses = slice(*batch.response_offsets[row : row + 2])
    times = batch.queued_s[row : row + 1], batch.generated_s[row : row + 1]
    return b"".join(one.tobytes() for one in (batch.tokens[tokens], batch.rollout_logprobs[responses], *times))


def _prompt(batch: Batch, row: int) -> list[int]:
    start = batch.sample_offsets[row]
    return list(map(int, batch.tokens[start : start + batch.prompt_lengths[row]]))


def _conversation(batch: Batch, row: int, tokenizer: Tokenizer) -> str | None:
    """Return what is wrong with what was said and answered in a row; None: nothing."""
    assert batch.token_kind is not None
    kinds = batch.token_kind[slice(*batch.response_offsets[row : row + 2])]
    start = batch.sample_offsets[row] + batch.prompt_lengths[row]
    tokens = batch.tokens[start : batch.sample_offsets[row + 1]]
    turns = turns_of(kinds, np.array([0, len(kinds)]))[:, 1:].tolist()
    for number, ((begin, end), (after, _)) in enumerate(pairwise(turns), start=1):
        said = tokenizer.decode(tokens[begin:end].tolist())
        between = tokens[end:after][kinds[end:after] == TokenKind.USER]
        heard = tokenizer.decode(between.tolist())
        if heard != f"{number}{''.join(filter(str.isdigit, said))[:3]}":
            return f"turn {number} said {said!r} and was answered {heard!r}"
    return None
