"""Which problem a group asks: a seeded permutation of all problems per epoch, of each source where there are several.

A group's problem depends on its number alone. So a run that goes on asks what an uninterrupted one would have asked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1000
"""Groups in which every source has its share. Shares are rounded to one in so many."""


class PromptOrder:
    """Group `i` asks problem `problem(i)`; every problem comes once an epoch.

    Random access, so a collector that starts again needs nothing but the number of the next group. Two epochs at most
    are kept in memory, 8 bytes a problem each. The order rests on the raw stream of the Philox generator, which NumPy
    promises to keep, not on `Generator.permutation`, which it may change.
    """

    def __init__(self, num_prompts: int, seed: int | str) -> None:
        if num_prompts < 1:
            raise ValueError(f"num_prompts is {num_prompts}, expected at least 1")
        self._num_prompts = num_prompts
        self._seed = seed
        self._permutation = lru_cache(maxsize=2)(self._permute)

    def epoch(self, group: int) -> int:
        """How often every problem was asked before this group's epoch."""
        return group // self._num_prompts

    def problem(self, group: int) -> int:
        """The problem that `group` ≥ 0 asks, 0 ≤ index < num_prompts."""
        if group < 0:
            raise ValueError(f"group is {group}, expected 0 or more")
        return int(self._permutation(self.epoch(group))[group % self._num_prompts])

    def _permute(self, epoch: int) -> NDArray[np.int64]:
        key = hashlib.sha256(f"prompt order/{self._seed}/{epoch}".encode()).digest()
        random = np.random.Philox(key=np.frombuffer(key[:16], "<u8")).random_raw(self._num_prompts)
        return np.argsort(random, kind="stable")


class MixedOrder:
    """Group `i` asks a problem of the source whose turn it is. Sources are named; problems count through all of them.

    Turns are spread evenly: of any n groups in a row a source has its share of n, give or take one or two. Each source
    has epochs of its own, so one that is small for its weight comes again sooner.
    """

    def __init__(self, sizes: Mapping[str, int], weights: Sequence[float], seed: int) -> None:
        """`sizes`: problems of each source; `weights` are in the same order, of any sum."""
        self._orders = [PromptOrder(size, f"{seed}/{name}") for name, size in sizes.items()]
        self._first = [0, *accumulate(sizes.values())]
        self._counts = shares(weights, _BLOCK)
        self._turns = spread(self._counts, self._counts)

    def problem(self, group: int) -> int:
        """The problem that `group` ≥ 0 asks, 0 ≤ index < the sum of all sizes."""
        if group < 0:
            raise ValueError(f"group is {group}, expected 0 or more")
        block, turn = divmod(group, _BLOCK)
        source, place = self._turns[turn]
        return self._first[source] + self._orders[source].problem(block * self._counts[source] + place)


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers of sum `total` in proportion to `weights`, none of them 0: what is left over after rounding down
    goes to the largest remainders. Raises ValueError for more weights than `total`."""
    if len(weights) > total:
        raise ValueError(f"there are {len(weights)} weights, expected at most {total}")
    exact = [weight / sum(weights) * total for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    nearest = sorted(range(len(weights)), key=lambda source: counts[source] - exact[source])
    for turn in range(total - sum(counts)):
        counts[nearest[turn % len(nearest)]] += 1
    while sum(counts) > total:  # those that were raised to 1
        counts[counts.index(max(counts))] -= 1
    return counts


def spread(counts: Sequence[int], weights: Sequence[float]) -> list[tuple[int, int]]:
    """(source, place in it) of all of `counts`, the sources taking turns in proportion to their `weights`."""
    places = [(source, place) for source, count in enumerate(counts) for place in range(count)]
    return sorted(places, key=lambda turn: ((turn[1] + 0.5) / weights[turn[0]], turn[0]))
