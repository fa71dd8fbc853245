"""Run work beside the main thread or the event loop, and report waits that make no progress.

rank 0   thread: hash 300 GB of a checkpoint ──────────────────────────────▶ done
           tell: "not yet" ─▶ "not yet" ─▶ …                               ─▶ the result, on every rank
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, TypeVarTuple, Unpack

from precision.text import one_line

if TYPE_CHECKING:
    from megatron_bridge.parallel.rank_sync import RankSync

ANSWER_S = 3.0
"""Rank 0 answers at least this often: the other ranks wait in a collective with a deadline."""
WRITE_DEADLINE_S = 60.0
"""Longest wait for diagnostics to be written."""
T = TypeVar("T")


def in_background(action: Callable[[], T], name: str) -> Future[T]:
    """Run the action in a thread. A process that ends by an error waits for it, so that no file is cut off."""
    threads = ThreadPoolExecutor(1, thread_name_prefix=name)
    work = threads.submit(action)
    threads.shutdown(wait=False)
    return work


def is_over(work: Future[Any] | None, wait_s: float) -> bool:
    """Return whether the work has ended in any way, or there is none, after waiting at most `wait_s`."""
    return work is None or bool(wait([work], wait_s).done)


class DiagnosticsWriter:
    """A thread that writes diagnostics in order, so that a slow disk delays no step.

    A failed write is skipped: the first failure is printed to stderr, and `close` prints their number. `put` waits
    while the queue is full, which bounds memory. No wait exceeds WRITE_DEADLINE_S: on a hanging disk, one line names
    the missing writes, and training goes on.
    """

    def __init__(self, most_waiting: int = 8) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="diagnostics")
        self._room = threading.Semaphore(most_waiting)
        self._waiting: dict[Future[None], str] = {}
        """The name of each pending write, in order; `put` removes those that have ended."""
        self._failed = 0

    def put(self, write: Callable[[], None], what: str) -> None:
        """Queue `write` behind all earlier writes. `what` names it in a warning."""
        if self._room.acquire(timeout=WRITE_DEADLINE_S):
            for work in filter(Future.done, [*self._waiting]):
                del self._waiting[work]
            self._waiting[self._thread.submit(self._write, write)] = what
        else:
            self._warn([what])

    def flush(self) -> None:
        left = wait(self._waiting, WRITE_DEADLINE_S).not_done
        if left:
            self._warn([name for work, name in self._waiting.items() if work in left])

    def close(self) -> None:
        """Flush, and end the thread without starting further writes."""
        self.flush()
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._failed > 1:
            print(f"warning: {self._failed} diagnostics of this run were not written", file=sys.stderr, flush=True)

    def _warn(self, names: list[str]) -> None:
        print(
            f"warning: diagnostics of {', '.join(names)} took over {WRITE_DEADLINE_S:g} s to write; training goes on",
            file=sys.stderr,
            flush=True,
        )

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # noqa: BLE001 - diagnostics fail no run
            self._failed += 1
            if self._failed == 1:
                print(
                    "warning: diagnostics of a step were not written "
                    f"({type(error).__name__}: {one_line(error, 300)}); training goes on without them",
                    file=sys.stderr,
                    flush=True,
                )
        finally:
            self._room.release()


class LongAction(Generic[T]):
    """An action of rank 0 that may take hours, beside the other work of the ranks. Created on every rank."""

    def __init__(self, ranks: RankSync, action: Callable[[], T]) -> None:
        self._ranks = ranks
        self._work: Future[T] | None = in_background(action, "long-action") if ranks.is_rank_zero else None

    def look(self, wait_s: float = 0.0) -> list[T]:
        """Return [result] or, still running after `wait_s`, []. Raises the action's error on all ranks. Collective."""

        def answer() -> list[T]:
            assert self._work is not None
            return [self._work.result()] if is_over(self._work, wait_s) else []

        return self._ranks.tell(answer)


def tell_when_done(ranks: RankSync, action: Callable[[], T]) -> T:
    """Run a long action on rank 0; return its result, a JSON value, or raise its error on every rank. Collective."""
    work = LongAction(ranks, action)
    while not (told := work.look(ANSWER_S)):
        pass
    return told[0]


SWITCH_S = 0.0005
"""The interpreter's switch interval, after which a thread is asked to release the GIL; Python's default is 5 ms."""
_THREAD = ThreadPoolExecutor(
    max_workers=1, thread_name_prefix="beside-loop", initializer=sys.setswitchinterval, initargs=(SWITCH_S,)
)

Arguments = TypeVarTuple("Arguments")


async def beside_loop(work: Callable[[Unpack[Arguments]], T], *arguments: *Arguments) -> T:
    """Run work that holds the GIL for milliseconds beside the event loop, and return its result.

    One thread does all of this work: only one can hold the GIL, and the loop would wait behind each. Work that mostly
    releases the GIL, such as a commit, gets a separate thread (asyncio.to_thread). At each socket read and NumPy
    operation the loop gives up the GIL and waits for this thread to release it; hence the short switch interval.
    """
    return await asyncio.get_running_loop().run_in_executor(_THREAD, work, *arguments)


def spare_collections() -> None:
    """Exclude existing objects from garbage collection, once a process is set up. Cycles among them are never freed."""
    gc.collect()
    gc.freeze()


FIRST_NOTICE_S = 60.0
RAREST_NOTICE_S = 1800.0
_SLOWEST_RETRY_S = 5.0

Say = Callable[..., None]
"""A callback with who, waits_for, seconds, unblocked_by and over (whether the wait has ended)."""


def print_notice(**notice: Any) -> None:
    print(notice_line(notice), file=sys.stderr, flush=True)


def noted_in(event: Callable[..., None]) -> Say:
    """Return a callback that prints each notice and writes it as an event; `event` is an EventLog's method."""

    def say(**notice: Any) -> None:
        print_notice(**notice)
        event("no_progress", **notice)

    return say


def notice_line(notice: dict[str, Any]) -> str:
    if notice["over"]:
        return f"{notice['who']} goes on after {notice['seconds']:.0f} s"
    return (
        f"no progress for {notice['seconds']:.0f} s: {notice['who']} waits for {notice['waits_for']}; "
        f"what would end the wait: {notice['unblocked_by']}"
    )


@dataclass
class Patience:
    """A reporter of waits without progress: after a minute, then ever more rarely. Not thread-safe.

        patience = Patience(say, "the collector", "the learner's publish")       one per kind of wait of a loop
        while not there():
            patience.still("version 13 (published: 12)")    reports now and then the wait, and what would end it
            sleep(pause_s)
        patience.progress()

    A kind of wait that usually takes longer, such as for a step of a large model, is reported when it takes twice as
    long as any before. Notices are for people: no process acts on them.
    """

    say: Say
    who: str
    unblocked_by: str
    first_s: float = FIRST_NOTICE_S
    _since: float | None = field(init=False, default=None)
    """Time of the first check without progress; None outside of a wait."""
    _longest_s: float = field(init=False, default=0.0)
    _due_s: float = field(init=False, default=0.0)
    _told: bool = field(init=False, default=False)

    def still(self, waits_for: str) -> None:
        """Record a check without progress."""
        now = time.monotonic()
        if self._since is None:
            self._since, self._told = now, False
            self._due_s = max(self.first_s, 2.0 * self._longest_s)
        waited_s = now - self._since
        if waited_s >= self._due_s:
            self.say(who=self.who, waits_for=waits_for, seconds=waited_s, unblocked_by=self.unblocked_by, over=False)
            self._told, self._due_s = True, waited_s + min(waited_s, RAREST_NOTICE_S)

    def progress(self) -> None:
        """Record that the wait has ended."""
        if self._since is None:
            return
        waited_s, self._since = time.monotonic() - self._since, None
        self._longest_s = max(self._longest_s, waited_s)
        if self._told:
            self.say(who=self.who, waits_for="", seconds=waited_s, unblocked_by=self.unblocked_by, over=True)


def retry_pause_s(first_s: float, failures: int) -> float:
    """Return the pause after 1 or more failures in a row: it doubles up to _SLOWEST_RETRY_S."""
    return min(first_s * 2.0 ** min(failures - 1, 16), _SLOWEST_RETRY_S)
