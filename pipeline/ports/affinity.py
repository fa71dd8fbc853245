"""Carry from turn to turn of an episode which engine holds its context, and count what is not prefilled again."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pipeline.data.batch import Completion


@dataclass
class PrefixHits:
    """A count of tokens that later turns of episodes repeat from their earlier ones."""

    repeated: int = 0
    """Those that an infinite cache on one engine would have had."""
    cached: int = 0
    """Those that the engines' caches had."""
    published: int = 0
    """Those that new weights, which empty the caches, had prefilled again: in an episode's next turn, or all that one
    under way had so far."""

    def figures(self) -> dict[str, float]:
        """Return the counts since the last call: the tokens, and which share of them was cached."""
        repeated, cached, published = self.repeated, self.cached, self.published
        self.repeated = self.cached = self.published = 0
        if not repeated:
            return {}
        return dict(prefix_tokens=repeated, prefix_hits=cached / repeated, prefix_published=published)


@dataclass(eq=False)
class Affinity:
    """One episode's place among the engines. Its owner is the episode: at its end nothing is left to forget."""

    hits: PrefixHits
    engine: int | None = None
    """Index of the engine that answered last; it holds the context."""
    key: str = field(default_factory=lambda: secrets.token_hex(8))
    """Names the episode's own keys and values, where they outlast an update of the weights."""
    _version: int | None = None
    _held: list[NDArray[np.int32]] = field(default_factory=list)
    """The tokens of each row so far whose keys and values some engine has computed."""

    def answered(self, prompt: Sequence[int], completion: Completion, *, keeps_kv: bool = False) -> None:
        """Take note of a turn's answer, and count what of its prompt was cached. `keeps_kv`: when new weights came, it
        went on over its keys and values."""
        if completion.finish == "abort":
            return
        asked, hits = np.array(prompt, np.int32), self.hits
        # An engine computes at least the last token of a prompt: its logits are those of the first sampled one.
        repeated = max((_num_equal(asked[:-1], held) for held in self._held), default=0)
        cached = min(repeated, completion.cached_tokens)
        hits.repeated, hits.cached = hits.repeated + repeated, hits.cached + cached
        if completion.distinct_versions[0] != self._version:
            hits.published += repeated - cached
        if not keeps_kv:
            changes = np.flatnonzero(np.diff(completion.versions)) + 1
            hits.published += int((len(asked) + changes - 1).sum())
        self.engine, self._version = completion.engine, completion.distinct_versions[-1]
        # The last sampled token has ended the request before any layer read it.
        now = np.concatenate([asked, completion.tokens[:-1]])
        self._held = [*(held for held in self._held if _num_equal(now, held) < len(held)), now]


def _num_equal(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Return how many tokens two rows begin with in common."""
    most = min(len(one), len(other))
    differ = np.flatnonzero(one[:most] != other[:most])
    return int(differ[0]) if len(differ) else most
