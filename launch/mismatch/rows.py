"""What is compared: rows of tokens of which an engine sampled the responses, and scores of those response tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class SampledRows:
    """Rows, and what the engine said as it sampled."""

    tokens: list[list[int]]
    """Prompt and response of each row."""
    prompt_lengths: list[int]
    decode: NDArray[np.float64]
    """[responses] log-probabilities under the run's contract, row after row."""

    def responses(self, scored: Sequence[NDArray[np.floating]]) -> NDArray[np.float64]:
        """[responses] of `scored`, which has [n - 1] values for tokens 1 … n-1 of each row."""
        return response_values(scored, self.prompt_lengths)

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


def response_values(scored: Sequence[NDArray[np.floating]], prompt_lengths: Sequence[int]) -> NDArray[np.float64]:
    """[responses] in float64: of each row, values of tokens 1 … n-1, those of the response, row after row."""
    parts = [row[prompt - 1 :] for row, prompt in zip(scored, prompt_lengths, strict=True)]
    return np.concatenate(parts).astype(np.float64)
