"""Group numbers, each handed out once: in order, to whichever batch asks.

How many groups a batch uses is not known before it is done (some are dropped, others asked instead), and several
batches are under way at once. So a batch, when it is committed, also says which groups below the highest number given
out belong to no committed batch: after a crash those are handed out first, then the numbers above. Nothing is lost, and
nothing is asked for two batches.

A batch that was damaged may be made again though later ones are there (a hole of the ledger). It asks the groups that
the batches around it leave, and no others: later batches have said long ago which groups are theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from pipeline.data.store import BatchStore, Entry, entry, groups_between, open_before


class Allocator(Protocol):
    """Hands out groups to batches."""

    def take(self, batch: int) -> int | None:
        """One more group for `batch`; None when it may take no more."""
        ...

    def leftover(self) -> Sequence[int]:
        """Groups that must be dropped in the batch that is about to be committed: no later one may take them."""
        ...

    def close_batch(self, batch: int) -> tuple[int, tuple[int, ...]]:
        """`next_group` and `open_groups` as `batch`, which is about to be committed, must store them."""
        ...


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

    def leftover(self) -> Sequence[int]:
        """None: what a batch does not take, a later one does."""
        return ()

    def close_batch(self, batch: int) -> tuple[int, tuple[int, ...]]:
        """`next_group` and `open_groups` as `batch`, which is about to be committed, must store them."""
        del self._held[batch]
        under_way = (group for groups in self._held.values() for group in groups)
        return self._next_group, tuple(sorted([*self._reclaimed, *under_way]))


class HoleAllocator:
    """The groups of one batch that is made again in a hole."""

    def __init__(self, before: Entry, after: Entry, wanted: int) -> None:
        """`before` is the batch just before this one, `after` the next one that there is. `wanted` groups are kept
        back for each further batch between the two."""
        self._index = before.index + 1
        self._after = after
        self._left = deque(groups_between(before, after))
        self._further = after.index - before.index - 2
        self._kept_back = self._further * wanted

    @staticmethod
    def of(store: BatchStore, index: int, wanted: int) -> HoleAllocator:
        """For batch `index`: all batches before it are there or lost, and at least one after it."""
        after = min(there for there in store.settled() if there > index)
        return HoleAllocator(entry(store, index - 1), entry(store, after), wanted)

    def take(self, batch: int) -> int | None:
        """The lowest group that is left, as long as enough are left for the further batches."""
        assert batch == self._index
        return self._left.popleft() if len(self._left) > self._kept_back else None

    def leftover(self) -> Sequence[int]:
        """Of the last batch of the hole: what it does not take."""
        if self._further:
            return ()
        left = [*self._left]
        self._left.clear()
        return left

    def close_batch(self, batch: int) -> tuple[int, tuple[int, ...]]:
        """As the batch must store them, so that those after it stay true."""
        assert batch == self._index
        return self._after.next_group, open_before(self._after, set(self._left))
