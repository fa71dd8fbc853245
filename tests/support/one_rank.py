"""The collective part of a Learner, for a learner of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class OneRank:
    """Rank 0 of 1."""

    is_rank_zero = True

    def tell(self, action: Callable[[], T]) -> T:
        return action()

    def everywhere(self, action: Callable[[], None]) -> None:
        action()

    def barrier(self) -> None:
        pass
