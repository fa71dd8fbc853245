"""The parts of a step's tokens that are measured apart: by advantage, position, entropy and age. No torch here: reports
are drawn where it is not installed.

Edges are the same in every run and every step, so that sums add up and steps compare.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """A way to divide the tokens by one number of each; bucket i holds edges[i - 1] <= number < edges[i]."""

    name: str
    title: str
    """What the number is, for figures."""
    edges: tuple[float, ...]
    buckets: tuple[str, ...]


SPLITS = (
    Split("advantage", "sign of the advantage", (0.0, 1.0), ("negative", "zero", "positive")),
    Split(
        "position",
        "place in the response",
        (1, 4, 16, 64, 256, 1024, 4096, 16384),
        ("0", "1-3", "4-15", "16-63", "64-255", "256-1023", "1024-4095", "4096-16383", "16384-"),
    ),
    Split(
        "entropy",
        "learner's entropy, nats",
        (0.01, 0.1, 0.3, 1.0, 3.0),
        ("0-0.01", "0.01-0.1", "0.1-0.3", "0.3-1", "1-3", "3-"),
    ),
    Split(
        "age",
        "age, versions",
        (1, 2, 3, 5, 9, 17),
        ("0", "1", "2", "3-4", "5-8", "9-16", "17-"),
    ),
)

ALL = "all"
GROUPS = (ALL, *(f"{split.name}/{bucket}" for split in SPLITS for bucket in split.buckets))
"""Names of the rows of every table: all tokens, then the buckets of each split. A token is in one bucket of each."""

OFFSETS = tuple(1 + sum(len(split.buckets) for split in SPLITS[:place]) for place in range(len(SPLITS)))
"""The row in GROUPS of each split's first bucket."""
