"""A call in a thread of its own, whose result is asked for later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """Runs `action` at once. The thread is a daemon: it need not finish its work when the process ends."""

    def __init__(self, name: str, action: Callable[[], T]) -> None:
        self._action = action
        self._results: list[T] = []
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def result(self) -> T:
        """Wait for its end; the result, or what it raised. There is no deadline here: the action must have one."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._action())
        except Exception as error:  # noqa: BLE001 (raised by result)
            self._failure = error
