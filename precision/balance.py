"""Distribute weighted items (rows of tokens, samples) over parts (ranks, micro-batches) of even weight.

    balanced   any item to any part
    sections   neighboring items to the same part, or to one of few parts that share a section

A step takes as long as its fullest part. The result depends on the weights alone, so every rank computes the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count

Part = tuple[int, tuple[int, ...]]
"""Weight and items of a part."""

_MIN_SECTION = 16
"""Least weight of a section, in multiples of the heaviest item. A cut between items is uneven by part of an item."""
_EVEN = 0.001
"""Relative unevenness below which longest-first is kept: nothing would be gained."""


def balanced(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Return part → items, ascending, every item in one part; the fullest part is no fuller than that of longest first.
    This is the better of longest first and largest differencing (Karmarkar and Karp); longest first on a tie, and where
    it is even already. Weights are not negative."""
    greedy = longest_first(weights, parts)
    if fullest(weights, greedy) * parts <= (1 + _EVEN) * sum(weights):
        return greedy
    return min(greedy, _differenced(weights, parts), key=lambda found: fullest(weights, found))


def sections(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Return part → items, ascending, like `balanced`, but each part takes its items from one section of neighbors.
    There are as many sections as can be cut evenly between items. Their number divides `parts`; each is balanced over
    equally many parts. With weights of a few dozen items for each part, every part has its own section."""
    heaviest = max(weights, default=0)
    wanted = parts if heaviest == 0 else sum(weights) // (_MIN_SECTION * heaviest)
    number = min(parts, max(1, wanted))
    while parts % number:
        number -= 1
    shared = parts // number
    found = []
    # Cut sections, the heaviest as light as can be; the last ones may be empty.
    least, most = max(heaviest, -(-sum(weights) // number)), sum(weights)
    while least < most:
        tried = (least + most) // 2
        if len(_filled(weights, tried)) <= number:
            most = tried
        else:
            least = tried + 1
    cuts = _filled(weights, least)
    for start, end in cuts + [(len(weights), len(weights))] * (number - len(cuts)):
        for part in balanced(weights[start:end], shared):
            found += [[start + item for item in part]]
    return found


def fullest(weights: Sequence[int], parts: Sequence[Sequence[int]]) -> int:
    found = 0
    for part in parts:
        found = max(found, sum([weights[item] for item in part]))
    return found


def longest_first(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Return part → items: the heaviest item first, each to the lightest part so far; ties go to the lower index."""
    found: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts)]
    for item in sorted(range(len(weights)), key=weights.__getitem__, reverse=True):  # stable
        load, part = loads[0]
        found[part].append(item)
        heapq.heapreplace(loads, (load + weights[item], part))
    return [sorted(part) for part in found]


def _differenced(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Return part → items by largest differencing: merge the two most uneven partitions, the fullest parts of one with
    the emptiest of the other, until one is left."""
    order = count()  # ties go to the partition that is older
    partitions: list[tuple[int, int, list[Part]]] = [
        (-weights[item], next(order), [(weights[item], (item,)), *[(0, ())] * (parts - 1)])
        for item in sorted(range(len(weights)), key=weights.__getitem__, reverse=True)
    ]
    while len(partitions) > 1:
        _, _, one = heapq.heappop(partitions)
        _, _, other = heapq.heappop(partitions)
        merged = [
            (one_weight + other_weight, (*one_items, *other_items))
            for (one_weight, one_items), (other_weight, other_items) in zip(one, reversed(other), strict=True)
        ]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(partitions, (merged[-1][0] - merged[0][0], next(order), merged))
    return [sorted(items) for _, items in partitions[0][2]]


def _filled(weights: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Return (start, end) of sections that each take items until they would weigh more than `most`."""
    cuts, start, held = [], 0, 0
    for item, weight in enumerate(weights):
        if held + weight > most:
            cuts.append((start, item))
            start, held = item, 0
        held += weight
    return [*cuts, (start, len(weights))]
