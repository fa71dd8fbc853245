"""What takes rank 0 longer than the other ranks may wait in a collective: it works in a thread, and answers "not yet".

rank 0   thread: hash 300 GB of a checkpoint ──────────────────────────────▶ done
         tell: "not yet" ─▶ "not yet" ─▶ …                               ─▶ the result, on every rank
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

from pipeline.background import in_background
from pipeline.ports.learner import Learner

ANSWER_S = 3.0
"""Rank 0 answers at least this often: the other ranks wait in a collective, which has a deadline of its own."""
T = TypeVar("T")


class LongAction(Generic[T]):
    """An action of rank 0 that may take hours, beside whatever the ranks do meanwhile. Made on every rank."""

    def __init__(self, learner: Learner, action: Callable[[], T]) -> None:
        """Begins now."""
        self._learner = learner
        self._work: Future[T] | None = in_background(action, "long-action") if learner.is_rank_zero else None

    def look(self, wait_s: float = 0.0) -> list[T]:
        """[its result] on every rank once it is over, else []; rank 0 waits for it no longer than `wait_s`. Raises on
        every rank what the action raised. Collective."""
        return self._learner.tell(lambda: self._answer(wait_s))

    def _answer(self, wait_s: float) -> list[Any]:
        assert self._work is not None
        wait([self._work], wait_s)
        return [self._work.result()] if self._work.done() else []


def tell_when_done(learner: Learner, action: Callable[[], T]) -> T:
    """As Learner.tell, for an action that may take hours. Collective."""
    work = LongAction(learner, action)
    while not (told := work.look(ANSWER_S)):
        pass
    return told[0]
