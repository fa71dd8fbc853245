"""Threads in the place of ranks, for mathematics that adds over them. Real ranks: tests/integration."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

from torch import Tensor

from precision.mismatch.statistics import Ranks

T = TypeVar("T")
DEADLINE_S = 60.0


def on_ranks(size: int, work: Callable[[Ranks], T]) -> list[T]:
    """What `work` returns on each of so many ranks. Raises BrokenBarrierError where one of them adds and another does
    not."""
    barrier, given = Barrier(size, timeout=DEADLINE_S), [Tensor()] * size

    def run(rank: int) -> T:
        def added(values: Tensor) -> Tensor:
            given[rank] = values
            barrier.wait()
            total = sum(given[1:], given[0].clone())
            barrier.wait()
            return values.copy_(total)

        try:
            return work(Ranks(rank=rank, size=size, sum=added))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return [each.result() for each in [threads.submit(run, rank) for rank in range(size)]]
