"""The rows by which `quant-map suggest` judges: prompts with responses, of which the sampled tokens are scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from pipeline.data.store import BatchStore
from precision.torch_on_use import Tensor, torch

if TYPE_CHECKING:
    from megatron_bridge.step.micro_batches import TokenRows


@dataclass(frozen=True, kw_only=True)
class ScoredRow:
    """One sample, or the beginning of one, as it goes through JSON."""

    tokens: list[int]
    """Prompt, then response."""
    sampled: list[bool]
    """[response tokens] False for those that no engine sampled."""
    group: int
    """The same for all rows of one prompt."""

    @property
    def prompt_length(self) -> int:
        """Tokens."""
        return len(self.tokens) - len(self.sampled)


@dataclass(frozen=True, kw_only=True)
class RecordedRows:
    """The beginnings of some samples of a batch that a run recorded. Ranks read the batch for what it has beside the
    tokens, kept sets and experts, which are many numbers for JSON."""

    batch: int
    samples: list[int]
    """Of each row, ascending."""
    rows: list[ScoredRow]

    def token_rows(self, store: BatchStore) -> TokenRows:
        """Their responses predicted, over the kept sets and with the experts that the learner trains with."""
        from megatron_bridge.step.micro_batches import TokenRows

        batch = store.read(self.batch, None)
        chosen = batch.select(np.isin(np.arange(batch.num_samples), self.samples))
        return TokenRows.of_batch(chosen).beginnings(np.array([len(row.tokens) for row in self.rows], np.int64))


def token_rows(rows: Sequence[ScoredRow]) -> TokenRows:
    """Their responses predicted."""
    from megatron_bridge.step.micro_batches import TokenRows

    return TokenRows(
        tokens=[np.array(row.tokens, np.int32) for row in rows],
        starts=np.array([row.prompt_length for row in rows], np.int64),
    )


def halves(rows: Sequence[ScoredRow]) -> tuple[Tensor, Tensor]:
    """Two sets of sampled tokens, bool [response tokens of all rows] each: those of every other prompt, and those that
    are held out. No prompt is in both."""
    prompts = sorted({row.group for row in rows})
    second = torch.tensor([prompts.index(row.group) % 2 == 1 for row in rows for _ in row.sampled])
    sampled = torch.tensor([*chain.from_iterable(row.sampled for row in rows)])
    return sampled & ~second, sampled & second
