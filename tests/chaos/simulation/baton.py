"""Who runs: a stack for each process, of which exactly one goes on at a time.

Greenlets where they are installed. Threads otherwise: the same history, but each change of hands then waits for the
operating system, which on a busy machine takes most of the time.
"""

from __future__ import annotations

import _thread
import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

try:
    import greenlet
except ImportError:
    greenlet = None  # type: ignore[assignment]


class Stack(Protocol):
    """A process' stack; a new one runs its body when it is first given the baton."""

    def give(self, to: Stack) -> None:
        """The caller, whose stack this is, waits until it is given the baton itself."""

    def leave(self, to: Stack) -> None:
        """The caller, whose stack this is, has ended; nothing but a return may follow."""


class GreenStack:
    """A greenlet. What Python keeps by thread, and asyncio uses, is kept by stack."""

    def __init__(self, body: Callable[[], None] | None = None) -> None:
        """Without a body: that of the caller."""
        self._green = greenlet.getcurrent() if body is None else greenlet.greenlet(lambda *_: body())
        if body is not None:
            self._green.parent = _ground(greenlet.getcurrent())

    def give(self, to: Any) -> None:
        loop, hooks = asyncio._get_running_loop(), sys.get_asyncgen_hooks()
        asyncio._set_running_loop(None)
        to._green.switch()
        asyncio._set_running_loop(loop)
        sys.set_asyncgen_hooks(*hooks)

    def leave(self, to: Any) -> None:
        self._green.parent = to._green


class ThreadStack:
    """A thread."""

    def __init__(self, body: Callable[[], None] | None = None) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()
        if body is not None:
            _thread.start_new_thread(self._run, (body,))

    def _run(self, body: Callable[[], None]) -> None:
        self._gate.acquire()
        body()

    def give(self, to: Any) -> None:
        to._gate.release()
        self._gate.acquire()

    def leave(self, to: Any) -> None:
        to._gate.release()


def new_stack(body: Callable[[], None] | None = None) -> Stack:
    """Of a body that ends with `leave`; without one, that of the caller."""
    return ThreadStack(body) if greenlet is None else GreenStack(body)


def _ground(green: Any) -> Any:
    while green.parent is not None:
        green = green.parent
    return green
