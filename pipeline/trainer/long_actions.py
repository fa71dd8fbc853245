"""What takes rank 0 longer than the other ranks may wait in a collective: it works in a thread, and answers "not yet".

rank 0   thread: hash 300 GB of a checkpoint ──────────────────────────────▶ done
         tell: "not yet" ─▶ "not yet" ─▶ …                               ─▶ the result, on every rank
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import Any, TypeVar

from pipeline.ports.learner import Learner

ANSWER_S = 3.0
"""Rank 0 answers at least this often: the other ranks wait in a collective, which has a deadline of its own."""
T = TypeVar("T")


def tell_when_done(learner: Learner, action: Callable[[], T]) -> T:
    """As Learner.tell, for an action that may take hours. Collective."""
    threads = ThreadPoolExecutor(1)
    work: list[Future[T]] = []

    def look() -> list[Any]:
        if not work:
            work.append(threads.submit(action))
        try:
            return [work[0].result(ANSWER_S)]
        except NotYet:
            if work[0].done():  # the action itself raised it
                raise
            return []

    try:
        while not (told := learner.tell(look)):
            pass
    finally:
        threads.shutdown(wait=False)
    result: T = told[0]
    return result
