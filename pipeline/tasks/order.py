"""Which problem a group asks: a seeded permutation of all problems per epoch."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


class PromptOrder:
    """Group `i` asks problem `problem(i)`; every problem comes once an epoch.

    Random access, so a collector that starts again needs nothing but the number of the next group. Two epochs at most
    are kept in memory, 8 bytes a problem each. The order rests on the raw stream of the Philox generator, which NumPy
    promises to keep, not on `Generator.permutation`, which it may change.
    """

    def __init__(self, num_prompts: int, seed: int) -> None:
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
