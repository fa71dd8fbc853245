"""Measure whether trained answers are shorter, or easier, than those that were issued.

    issued     the answers to the groups asked in each batch's turn, wherever they are trained, or filtered out
    trained    the answers in the committed batches

Both are compared over the newest batches in whose turn every group is done: where groups pass slower ones, or a filter
leaves some out, the two differ. Groups dropped for equal rewards count nowhere: they would teach nothing. Each token
counts once, as in the loss. The group is the unit of chance: its samples have one prompt, and count by their mean.

With T(x) and I(x) the shares of trained and issued tokens in groups whose mean length is at most x tokens, the distance

    D = max over x of T(x) - I(x)

is the one-sided statistic of Kolmogorov and Smirnov: 0 where nothing moved to shorter answers, 1 where everything did.
Chance alone exceeds sqrt(-ln(alpha) / 2 · (1/t + 1/i)) in a share alpha of cases, for large independent sets of t and i
groups (Smirnov 1939; Hodges, Arkiv för Matematik 3, 1958). Groups of unequal weight w count as (Σ w)² / Σ w² (Kish,
Survey Sampling, 1965). Groups that both sets hold bring the distance further down, so the bound is a cautious one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.rollout.batch_builder import BatchBuilder, Judged

CHANCE = 0.01
"""The share of cases in which chance alone may exceed the bound (alpha)."""
_MOST_BATCHES = 32
"""The most batches that are compared together, where a stage has more under way."""
_QUANTILES = (0.1, 0.5, 0.9)


class BiasWatch:
    """The answers of a collector's newest batches, as issued and as trained."""

    def __init__(self, batches_in_flight: int) -> None:
        """No group falls back by more batches than are under way: over more, what passed it counts less and less."""
        self._num_batches = min(batches_in_flight, _MOST_BATCHES)
        self._compared = -1
        """The newest batch that was compared."""
        self._trained: dict[int, list[Judged]] = {}
        """Batch → its groups."""
        self._issued: dict[int, list[Judged]] = {}
        """Batch → the groups asked in its turn that are done."""

    def add(self, builder: BatchBuilder, later: Sequence[BatchBuilder]) -> dict[str, float]:
        """Take a batch that is about to be committed; `later` are the others under way. Compare one batch more, with
        those before it: return `trained_shorter` and `trained_easier`, the distance D of lengths and of rewards, or 0
        where chance may have made it; and 10, 50 and 90 % quantiles of both, by token. Empty while there is none in
        whose turn every group is done, and for the first: what it leaves to the second is no bias yet."""
        if builder.index - 1 not in self._trained:  # the first, or one that was made again
            self._trained, self._issued, self._compared = {}, {}, builder.index - 1
        left_out = {drop.group for drop in builder.dropped if drop.kind == "zero_variance"}
        kept = {group.prompt.group for group in builder.kept}
        self._trained[builder.index] = [one for group, one in builder.judged.items() if group in kept]
        for group, one in builder.judged.items():
            if group not in left_out:
                self._issued.setdefault(one.turn // builder.wanted, []).append(one)
        open_turns = (place.turn // builder.wanted for other in later for place in other.places)
        if self._compared >= min([builder.index, *(turn - 1 for turn in open_turns)]):
            return {}
        self._compared += 1
        for past in [index for index in self._trained if index <= self._compared - self._num_batches]:
            del self._trained[past]
            self._issued.pop(past, None)
        batches = [index for index in self._trained if index <= self._compared]
        if len(batches) < min(2, self._num_batches):
            return {}
        trained = [one for index in batches for one in self._trained[index]]
        issued = [one for index in batches for one in self._issued.get(index, ())]
        found: dict[str, float] = {}
        for name, distance, sign in (("length", "trained_shorter", 1.0), ("reward", "trained_easier", -1.0)):
            sides = dict(trained=_by_token(trained, name), issued=_by_token(issued, name))
            if all(weights.sum() > 0 for _, weights in sides.values()):
                found[distance] = beyond_chance(*((sign * values, weights) for values, weights in sides.values()))
                for side, weighted in sides.items():
                    found |= _quantiles(f"{side}_{name}", *weighted)
        return found


Weighted = tuple[NDArray[np.float64], NDArray[np.float64]]
"""[n] values and their weights, of which one is above 0."""


def _by_token(groups: Sequence[Judged], name: str) -> Weighted:
    """Return the lengths or rewards of the groups that have one, by tokens."""
    known = [(value, float(one.tokens)) for one in groups if (value := getattr(one, name)) is not None]
    values, weights = np.array(known, np.float64).reshape(-1, 2).T
    return values, weights


def beyond_chance(trained: Weighted, issued: Weighted) -> float:
    """Return D of trained against issued values, or 0.0 where chance may have made it as large."""
    values = np.unique(np.concatenate([trained[0], issued[0]]))
    shares, variance = [], 0.0
    for own, weights in (trained, issued):
        within = np.bincount(np.searchsorted(values, own), weights, minlength=len(values))
        shares.append(np.cumsum(within) / weights.sum())
        variance += float((weights**2).sum() / weights.sum() ** 2)
    distance = float(np.max(shares[0] - shares[1]))
    return distance if distance > math.sqrt(-math.log(CHANCE) / 2 * variance) else 0.0


def _quantiles(name: str, values: NDArray[np.float64], weights: NDArray[np.float64]) -> dict[str, float]:
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order]) / weights.sum()
    places = np.minimum(np.searchsorted(reached, _QUANTILES), len(values) - 1)
    return {
        f"{name}_p{share * 100:.0f}": float(values[order][at]) for share, at in zip(_QUANTILES, places, strict=True)
    }
