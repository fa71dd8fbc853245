"""Items dealt out to parts: each once, never worse than longest first, the same every time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precision.balance import balanced, fullest, longest_first, sections

WEIGHTS = st.lists(st.integers(0, 1000), max_size=60)
PARTS = st.integers(1, 9)


def reasoning_lengths(samples: int, seed: int = 0) -> list[int]:
    """Sixteen samples a prompt, median 4k, cut at 32k; prompts differ in how long they are thought about."""
    random = np.random.default_rng(seed)
    medians = np.repeat(4096 * np.exp(0.7 * random.standard_normal(samples // 16)), 16)
    return np.minimum(32768, medians * np.exp(0.6 * random.standard_normal(samples))).astype(int).tolist()


def unevenness(weights: list[int], parts: list[list[int]]) -> float:
    return fullest(weights, parts) * len(parts) / sum(weights) - 1


def test_longest_first_by_hand() -> None:
    # 8 | 7 | 6+… : 8, 7, 6, then 5 to the 6, 4 to the 7: loads 8, 11, 11
    assert longest_first([4, 8, 5, 7, 6], 3) == [[1], [0, 3], [2, 4]]


def test_differencing_finds_what_longest_first_does_not() -> None:
    # The textbook's example. Longest first: 8+5+4 against 7+6; differencing: 8+6 against 7+5+4.
    weights = [8, 7, 6, 5, 4]
    assert fullest(weights, longest_first(weights, 2)) == 17
    assert fullest(weights, balanced(weights, 2)) == 16


@given(weights=WEIGHTS, parts=PARTS)
@pytest.mark.parametrize("deal", [balanced, sections, longest_first])
def test_every_item_is_in_one_part(deal: object, weights: list[int], parts: int) -> None:
    found = deal(weights, parts)  # type: ignore[operator]
    assert len(found) == parts
    assert sorted(item for part in found for item in part) == list(range(len(weights)))
    assert all(part == sorted(part) for part in found)
    assert found == deal(list(weights), parts)  # type: ignore[operator]


@given(weights=WEIGHTS, parts=PARTS)
def test_balanced_is_never_worse_than_longest_first(weights: list[int], parts: int) -> None:
    assert fullest(weights, balanced(weights, parts)) <= fullest(weights, longest_first(weights, parts))


@given(weights=WEIGHTS, parts=PARTS)
def test_no_part_exceeds_the_mean_by_more_than_the_heaviest_item(weights: list[int], parts: int) -> None:
    heaviest = max(weights, default=0)
    assert fullest(weights, balanced(weights, parts)) <= sum(weights) / parts + heaviest
    # A section exceeds its mean by less than an item, and a part of it the section's mean by another.
    assert fullest(weights, sections(weights, parts)) <= sum(weights) / parts + 2 * heaviest


@given(weights=WEIGHTS, parts=PARTS)
def test_the_items_of_a_part_lie_in_one_section(weights: list[int], parts: int) -> None:
    """Two parts share a section or lie apart; as many parts share each."""
    spans = [(part[0], part[-1]) for part in sections(weights, parts) if part]
    groups: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if groups and first <= groups[-1][1]:
            groups[-1] = (groups[-1][0], max(last, groups[-1][1]))
        else:
            groups.append((first, last))
    assert sum(last - first + 1 for first, last in groups) <= len(weights)


def test_with_many_items_every_part_has_a_section_of_its_own() -> None:
    assert sections([10] * 64, 4) == [list(range(start, start + 16)) for start in range(0, 64, 16)]


@pytest.mark.parametrize(("parts", "read"), [(4, 0.27), (8, 0.15), (64, 0.15)])
def test_ranks_of_a_reasoning_batch_read_little_and_work_alike(parts: int, read: float) -> None:
    weights = reasoning_lengths(1024)
    found = sections(weights, parts)
    assert unevenness(weights, found) < 0.02
    spans = [sum(weights[part[0] : part[-1] + 1]) / sum(weights) for part in found]
    assert max(spans) <= read
    # What equal numbers of samples would cost: the reason for all this.
    equal = [part.tolist() for part in np.array_split(np.arange(len(weights)), parts)]
    assert unevenness(weights, equal) > 0.1
