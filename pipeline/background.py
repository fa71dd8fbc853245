"""Work beside the main thread of a process, and what takes rank 0 longer than the other ranks may wait in a collective.

rank 0   thread: hash 300 GB of a checkpoint ──────────────────────────────▶ done
         tell: "not yet" ─▶ "not yet" ─▶ …                               ─▶ the result, on every rank
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, Protocol, TypeVar

ANSWER_S = 3.0
"""Rank 0 answers at least this often: the other ranks wait in a collective, which has a deadline of its own."""
T = TypeVar("T")


def in_background(action: Callable[[], T], name: str) -> Future[T]:
    """What the action returns or raises, once it has. A process that ends by an error, and is not killed, waits for it:
    files are written or not, not cut off by an interpreter that is taken down."""
    threads = ThreadPoolExecutor(1, thread_name_prefix=name)
    work = threads.submit(action)
    threads.shutdown(wait=False)
    return work


def is_over(work: Future[Any] | None, wait_s: float) -> bool:
    """Whether the work has ended, well or not, or there is none; it is waited for no longer than `wait_s`."""
    return work is None or bool(wait([work], wait_s).done)


class Ranks(Protocol):
    """Ranks of which rank 0 tells the others what it has done: a learner, or what it is made of."""

    @property
    def is_rank_zero(self) -> bool:
        """True on that one rank."""
        ...

    def tell(self, action: Callable[[], T]) -> T:
        """Collective. The action's result on rank 0, a JSON value, on every rank; every rank raises what it raised."""
        ...


class LongAction(Generic[T]):
    """An action of rank 0 that may take hours, beside whatever the ranks do meanwhile. Made on every rank."""

    def __init__(self, ranks: Ranks, action: Callable[[], T]) -> None:
        """Begins now."""
        self._ranks = ranks
        self._work: Future[T] | None = in_background(action, "long-action") if ranks.is_rank_zero else None

    def look(self, wait_s: float = 0.0) -> list[T]:
        """[its result] on every rank once it is over, else []; rank 0 waits for it no longer than `wait_s`. Raises on
        every rank what the action raised. Collective."""
        return self._ranks.tell(lambda: self._answer(wait_s))

    def _answer(self, wait_s: float) -> list[Any]:
        assert self._work is not None
        return [self._work.result()] if is_over(self._work, wait_s) else []


def tell_when_done(ranks: Ranks, action: Callable[[], T]) -> T:
    """As Ranks.tell, for an action that may take hours. Collective."""
    work = LongAction(ranks, action)
    while not (told := work.look(ANSWER_S)):
        pass
    return told[0]
