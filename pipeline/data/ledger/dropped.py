"""Groups that no batch holds, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DropKind = Literal["unfit", "zero_variance", "filtered", "solved"]
"""unfit: it cannot be asked. zero_variance: all its rewards are equal, and another group took its place. filtered:
the user's prompts.group_filter did not keep it. solved: its problem is solved too often to be asked again."""


@dataclass(frozen=True, kw_only=True)
class DroppedGroup:
    """A group that will never be trained on, with the reason. It is recorded in the batch for which it was asked."""

    group: int
    reason: str
    kind: DropKind = "unfit"
    problem: int = -1
    """As in Prompt."""
    samples: int = 0
    """How many were sampled and scored before it was dropped; they count for the problem's pass rate."""
    solved: int = 0
    """How many of them solved the problem."""
