"""Which groups the batches held that are gone: it follows from the batches around them.

batch 11    gone: 12, 13    batch 14
   │                           │
   └── 11 says what is open ───┴── 14 says what is closed, and which groups are its own: the rest is of 12 and 13
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.data.store import BatchStore


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a batch, committed or lost, says about groups."""

    index: int
    own: tuple[int, ...]
    next_group: int
    open_groups: tuple[int, ...]


_NOTHING = Entry(index=-1, own=(), next_group=0, open_groups=())


def entry(store: BatchStore, index: int) -> Entry:
    """Of batch `index`, which is committed or lost, or -1: before the first. Raises as BatchStore.read does."""
    if index < 0:
        return _NOTHING
    if (lost := store.lost(index)) is not None:
        return Entry(index=index, own=lost.groups, next_group=lost.next_group, open_groups=lost.open_groups)
    batch = store.read(index, None)
    own = {*np.unique(batch.group).tolist(), *(drop.group for drop in batch.dropped)}
    return Entry(index=index, own=tuple(sorted(own)), next_group=batch.next_group, open_groups=batch.open_groups)


def groups_between(before: Entry, after: Entry) -> list[int]:
    """The groups of the batches between two that follow one another in the ledger, ascending."""
    candidates = {*before.open_groups, *range(before.next_group, after.next_group)}
    return sorted(candidates - set(after.open_groups) - set(after.own))


def open_before(after: Entry, left: set[int]) -> tuple[int, ...]:
    """`open_groups` of a batch that is followed by `after`, and by batches between the two that take `left`. Its
    `next_group` is that of `after`."""
    return tuple(sorted({*after.open_groups, *after.own, *left}))
