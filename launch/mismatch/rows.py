"""What is compared: rows of tokens of which an engine sampled the responses, and scores of those response tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.data.batch import KeptSets
from pipeline.data.routed_experts import RoutedExperts


@dataclass(frozen=True, kw_only=True)
class SampledRows:
    """Rows, and what the engine said as it sampled."""

    tokens: list[list[int]]
    """Prompt and response of each row."""
    prompt_lengths: list[int]
    decode: NDArray[np.float64]
    """[responses] log-probabilities under the run's contract, row after row."""
    kept: KeptSets | None = None
    """[responses] what every score is renormalized over; None: the whole vocabulary."""
    experts: RoutedExperts | None = None
    """[tokens of all rows] where the engine sent each; None: not known, or a dense model."""

    @property
    def position(self) -> NDArray[np.int64]:
        """[responses] place of each token in its response, from 0."""
        return np.concatenate([np.arange(length) for length in self.lengths]).astype(np.int64)

    @property
    def row(self) -> NDArray[np.int64]:
        """[responses] the row of each token."""
        return np.repeat(np.arange(len(self.tokens)), self.lengths)

    @property
    def lengths(self) -> list[int]:
        """Of the responses, in tokens."""
        return [len(row) - prompt for row, prompt in zip(self.tokens, self.prompt_lengths, strict=True)]

    def part(self, rows: Sequence[int]) -> SampledRows:
        """Some rows alone, ascending."""
        here = np.flatnonzero(np.isin(self.row, rows))
        return SampledRows(
            tokens=[self.tokens[row] for row in rows],
            prompt_lengths=[self.prompt_lengths[row] for row in rows],
            decode=self.decode[here],
            kept=None if self.kept is None else self.kept.take(here),
            experts=None if self.experts is None else self.experts[tokens_of(self.tokens, rows)],
        )

    def kept_by_row(self) -> list[list[NDArray[np.int32]]] | None:
        """For tokens 1 … n-1 of each row, the set that each is renormalized over; empty: the whole vocabulary."""
        if self.kept is None:
            return None
        sets, whole = np.split(self.kept.tokens, self.kept.offsets[1:-1]), np.zeros(0, np.int32)
        ends = np.cumsum([0, *self.lengths])
        return [
            [whole] * (prompt - 1) + sets[start:end]
            for prompt, start, end in zip(self.prompt_lengths, ends[:-1], ends[1:], strict=True)
        ]


def tokens_of(tokens: Sequence[Sequence[int]], rows: Sequence[int]) -> NDArray[np.bool_]:
    """[tokens of all rows] those of some rows, which are in ascending order."""
    return np.repeat(np.isin(np.arange(len(tokens)), rows), [len(row) for row in tokens])
