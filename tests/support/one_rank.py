"""The collective part of a Learner, for a learner of one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from pipeline.data.checksums import Fingerprint

T = TypeVar("T")


class OneRank:
    """Rank 0 of 1."""

    is_rank_zero = True
    rank, num_ranks, num_data_ranks = 0, 1, 1

    def tell(self, action: Callable[[], T]) -> T:
        return action()

    def gather(self, action: Callable[[], T]) -> list[T]:
        return [action()]

    def barrier(self) -> None:
        pass

    def save(self, directory: Path) -> None:
        raise NotImplementedError

    def begin_save(self, directory: Path) -> Written:
        """Whatever `save` writes is written at once."""
        self.save(directory)
        return Written()


class Written:
    """A save that is over, of which nothing is hashed yet."""

    hashed: Mapping[str, Fingerprint] = MappingProxyType({})

    def advance(self, wait_s: float) -> bool:
        return True
