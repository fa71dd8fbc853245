"""Group numbers, each handed out once: in order, to whichever batch asks.

How many groups a batch uses is not known before it is done (some are dropped, others asked instead), and several
batches are under way at once. So a batch, when it is committed, also says which groups below the highest number given
out belong to no committed batch: after a crash those are handed out first, then the numbers above. Nothing is lost, and
nothing is asked for two batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class GroupAllocator:
    """Starts from what the newest committed batch says: its `next_group` and `open_groups`."""

    def __init__(self, next_group: int, open_groups: Iterable[int]) -> None:
        self._next_group = next_group
        self._reclaimed = deque(sorted(open_groups))
        self._held: dict[int, list[int]] = {}
        """By batch under way, its groups."""

    def take(self, batch: int) -> int:
        """One more group for `batch`."""
        if self._reclaimed:
            group = self._reclaimed.popleft()
        else:
            group = self._next_group
            self._next_group += 1
        self._held.setdefault(batch, []).append(group)
        return group

    def close_batch(self, batch: int) -> tuple[int, tuple[int, ...]]:
        """`next_group` and `open_groups` as `batch`, which is about to be committed, must store them."""
        del self._held[batch]
        under_way = (group for groups in self._held.values() for group in groups)
        return self._next_group, tuple(sorted([*self._reclaimed, *under_way]))
