"""Groups that no batch holds, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

DropKind = Literal["unfit", "zero_variance", "filtered", "solved"]
"""unfit: it cannot be asked. zero_variance: all its rewards are equal, and another group took its place. filtered:
the user's prompts.group_filter did not keep it. solved: its problem is solved too often to be asked again."""

PASSED_OVER = ("solved_groups", "solved_problems")
"""The arrays of a batch's file that hold its groups of solved problems: int64 [passed over]. They may be most of an
epoch, of which attributes could hold some ten thousand."""


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

    @staticmethod
    def passed_over(group: int, problem: int) -> DroppedGroup:
        """A group whose problem is solved."""
        return DroppedGroup(group=group, reason=f"problem {problem} is solved", kind="solved", problem=problem)

    @property
    def is_passed_over(self) -> bool:
        """Whether group and problem say all of it."""
        return self.kind == "solved" and self == DroppedGroup.passed_over(self.group, self.problem)


def arrays_of_passed_over(dropped: Sequence[DroppedGroup]) -> dict[str, NDArray[np.int64]]:
    """PASSED_OVER of those in `dropped` that were; empty where none was."""
    found = [(drop.group, drop.problem) for drop in dropped if drop.is_passed_over]
    return dict(zip(PASSED_OVER, np.array(found, np.int64).T.copy(), strict=True)) if found else {}


def all_dropped(listed: Sequence[DroppedGroup], groups: NDArray[Any], problems: NDArray[Any]) -> list[DroppedGroup]:
    """Those that are `listed` and those of PASSED_OVER, by group. Raises ValueError when the arrays do not agree."""
    if not groups.dtype == problems.dtype == np.int64 or groups.ndim != 1 or groups.shape != problems.shape:
        raise ValueError(f"{PASSED_OVER} are {groups.dtype}{groups.shape} and {problems.dtype}{problems.shape}")
    passed = [DroppedGroup.passed_over(*each) for each in zip(groups.tolist(), problems.tolist(), strict=True)]
    return sorted([*listed, *passed], key=lambda drop: drop.group)
