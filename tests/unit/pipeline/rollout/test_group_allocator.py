"""Every group has one owner, whichever batch asks when, and wherever the collector dies."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.rollout.group_allocator import GroupAllocator


def test_golden() -> None:
    """Batches 0 and 1 take two groups each, 0 a third; 0 is committed, then the collector dies."""
    allocator = GroupAllocator(0, ())
    assert [allocator.take(batch) for batch in (0, 0, 1, 1, 0)] == [0, 1, 2, 3, 4]
    next_group, open_groups = allocator.close_batch(0)
    assert (next_group, open_groups) == (5, (2, 3))
    again = GroupAllocator(next_group, open_groups)
    assert [again.take(1) for _ in range(2)] == [2, 3]
    assert again.take(2) == 5
    assert again.close_batch(1) == (6, (5,))


def test_what_is_not_taken_up_at_once_stays_open() -> None:
    allocator = GroupAllocator(9, (7, 3))
    assert allocator.take(4) == 3
    assert allocator.close_batch(4) == (9, (7,))


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["take", "take", "commit", "die"])), max_size=80))
def test_nothing_is_lost_and_nothing_is_taken_twice(actions: list[tuple[int, str]]) -> None:
    """Batches are committed in order; the oldest three are under way; a death forgets all but what was committed."""
    allocator, stored = GroupAllocator(0, ()), (0, ())
    committed: list[set[int]] = []
    under_way: dict[int, set[int]] = {}
    for offset, action in actions:
        batch = len(committed) + offset
        if action == "take":
            group = allocator.take(batch)
            assert all(group not in groups for groups in [*committed, *under_way.values()])
            under_way.setdefault(batch, set()).add(group)
        elif action == "commit" and len(committed) in under_way:
            stored = allocator.close_batch(len(committed))
            committed.append(under_way.pop(len(committed)))
        elif action == "die":
            allocator, under_way = GroupAllocator(*stored), {}
        next_group, open_groups = stored
        seen = [group for groups in committed for group in groups]
        assert sorted([*seen, *open_groups]) == list(range(next_group))
