"""Work beside the main thread of a process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

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
