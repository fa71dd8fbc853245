"""Kept sets: the tokens that top-p and top-k left an engine to choose from, one set for each response token.

An engine that cuts its distribution samples from the renormalized rest. Whoever wants the probability of a sampled
token must know that rest: it depends on the engine's own logits and cannot be worked out by another program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptSets:
    """One set of token ids for each of n response tokens, ragged. A token that no engine sampled has an empty set."""

    offsets: NDArray[np.int64]
    """[n + 1] where each token's set starts in `tokens`."""
    tokens: NDArray[np.int32]
    """[kept] token ids, ascending within a set."""

    @staticmethod
    def of(sets: Sequence[Sequence[int]]) -> KeptSets:
        """From one sequence of ids a token, in any order."""
        counts = np.fromiter(map(len, sets), np.int64, len(sets))
        tokens = np.fromiter(chain.from_iterable(sets), np.int32, int(counts.sum()))
        owner = np.repeat(np.arange(len(sets)), counts)
        return KeptSets(offsets=_offsets(counts), tokens=tokens[np.lexsort((tokens, owner))])

    @staticmethod
    def empty(num_tokens: int) -> KeptSets:
        """For tokens that no engine sampled."""
        return KeptSets(offsets=np.zeros(num_tokens + 1, np.int64), tokens=np.zeros(0, np.int32))

    @staticmethod
    def joined(parts: Sequence[KeptSets]) -> KeptSets:
        """The sets of one part after those of another."""
        counts = np.concatenate([np.zeros(0, np.int64), *(part.counts for part in parts)])
        return KeptSets(
            offsets=_offsets(counts), tokens=np.concatenate([np.zeros(0, np.int32), *(part.tokens for part in parts)])
        )

    def __len__(self) -> int:
        """Response tokens."""
        return len(self.offsets) - 1

    @property
    def counts(self) -> NDArray[np.int64]:
        """[n] ids in each set."""
        return np.diff(self.offsets)

    def take(self, places: NDArray[np.int64]) -> KeptSets:
        """The sets at `places` [m], in that order; at a place of -1 an empty one."""
        counts = np.where(places < 0, 0, np.append(self.counts, 0)[places])
        offsets = _offsets(counts)
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        return KeptSets(offsets=offsets, tokens=self.tokens[np.repeat(self.offsets[places], counts) + within])

    def hold(self, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """[n] whether each of `tokens` [n] is in its set."""
        owner = np.repeat(np.arange(len(self)), self.counts)
        found = np.zeros(len(self), np.bool_)
        found[owner[self.tokens == tokens[owner]]] = True
        return found

    def check(self, tokens: NDArray[np.int32], sampled: NDArray[np.bool_]) -> None:
        """Raises ValueError unless there is a set for each of the response tokens `tokens` [n], which holds it where
        an engine `sampled` [n] it and is empty elsewhere."""
        for name, array, dtype in (("kept_offsets", self.offsets, np.int64), ("kept_tokens", self.tokens, np.int32)):
            if array.dtype != dtype or array.ndim != 1:
                raise ValueError(f"{name} is {array.dtype} with {array.ndim} axes, expected {np.dtype(dtype)} with 1")
        if len(self.offsets) != len(tokens) + 1:
            raise ValueError(f"kept_offsets has {len(self.offsets)} entries, expected {len(tokens) + 1}")
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.tokens) or np.any(self.counts < 0):
            raise ValueError(f"kept_offsets does not rise from 0 to the {len(self.tokens)} kept tokens")
        owner = np.repeat(np.arange(len(self)), self.counts)
        if np.any(self.tokens < 0) or np.any((np.diff(self.tokens) <= 0) & (np.diff(owner) == 0)):
            raise ValueError("kept_tokens holds a negative id, or a set is not ascending")
        if np.any(self.counts[~sampled] > 0):
            raise ValueError("a token outside loss_mask has a kept set, expected an empty one: no engine sampled it")
        if missing := np.flatnonzero(sampled & ~self.hold(tokens)).tolist():
            raise ValueError(
                f"{len(missing)} sampled tokens are not in their own kept set, the first is response token {missing[0]}"
            )


def _offsets(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
