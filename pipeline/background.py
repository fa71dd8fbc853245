"""Work beside the main thread or the event loop of a process, and waits that say so when nothing gets on.

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
"""Rank 0 answers at least this often: the other ranks wait in a collective, which has a deadline of its own."""
WRITE_DEADLINE_S = 60.0
"""Longest wait for diagnostics to be written."""
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


class DiagnosticsWriter:
    """Writes what explains a run on a thread of its own, in order, so that a slow disk delays no step.

        put ──▶ at most `most_waiting`, in order ──▶ thread ──▶ files

    A write that fails is passed over: the first says so on stderr, `close` says how many followed. While as many wait
    as may, `put` waits too, so that memory stays bounded. No wait is longer than WRITE_DEADLINE_S: on a disk that
    hangs, one line names what was not written, and training goes on.
    """

    def __init__(self, most_waiting: int = 8) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="diagnostics")
        self._room = threading.Semaphore(most_waiting)
        self._waiting: dict[Future[None], str] = {}
        """What each write is of, in order; those that have ended are taken out as others are put."""
        self._failed = 0

    def put(self, write: Callable[[], None], what: str) -> None:
        """Have the thread call `write`, after all that was put before. `what` names it for a warning."""
        if self._room.acquire(timeout=WRITE_DEADLINE_S):
            self._waiting = {work: name for work, name in self._waiting.items() if not work.done()}
            self._waiting[self._thread.submit(self._write, write)] = what
        else:
            self._warn([what])

    def flush(self) -> None:
        """Wait until all that was put is written, or the deadline has passed."""
        left = wait(self._waiting, WRITE_DEADLINE_S).not_done
        if left:
            self._warn([name for work, name in self._waiting.items() if work in left])

    def close(self) -> None:
        """Flush, and end the thread; what it has not begun by then is not written."""
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
    """An action of rank 0 that may take hours, beside whatever the ranks do meanwhile. Made on every rank."""

    def __init__(self, ranks: RankSync, action: Callable[[], T]) -> None:
        """Begins now."""
        self._ranks = ranks
        self._work: Future[T] | None = in_background(action, "long-action") if ranks.is_rank_zero else None

    def look(self, wait_s: float = 0.0) -> list[T]:
        """[its result] on every rank once it is over, else []; rank 0 waits for it no longer than `wait_s`. Raises on
        every rank what the action raised. Collective."""

        def answer() -> list[T]:
            assert self._work is not None
            return [self._work.result()] if is_over(self._work, wait_s) else []

        return self._ranks.tell(answer)


def tell_when_done(ranks: RankSync, action: Callable[[], T]) -> T:
    """Return the action's result on rank 0, a JSON value, on every rank, for one that may take hours; every rank raises
    what it raised. Collective."""
    work = LongAction(ranks, action)
    while not (told := work.look(ANSWER_S)):
        pass
    return told[0]


SWITCH_S = 0.0005
"""After so long the thread is asked to give the lock away; without it, after 5 ms."""
_THREAD = ThreadPoolExecutor(
    max_workers=1, thread_name_prefix="beside-loop", initializer=sys.setswitchinterval, initargs=(SWITCH_S,)
)

Arguments = TypeVarTuple("Arguments")


async def beside_loop(work: Callable[[Unpack[Arguments]], T], *arguments: *Arguments) -> T:
    """Do work that needs Python's lock for milliseconds beside the event loop; return what it returns.

    One thread does all of it: more would not be faster, for one at a time has the lock, and the loop would wait for the
    lock behind each of them. What computes without the lock for long, such as the commit of a batch, has a thread of
    its own (asyncio.to_thread). Whatever gives the lock away on the loop itself, each read of a socket and what NumPy
    does to thousands of numbers, waits for this thread to give it back; so the thread is asked for it ten times as
    often as Python would.
    """
    return await asyncio.get_running_loop().run_in_executor(_THREAD, work, *arguments)


def spare_collections() -> None:
    """Leave the objects that there are out of all later collections of garbage. For a process that has imported and
    built what it needs: what of it becomes a cycle of garbage later is never freed."""
    gc.collect()
    gc.freeze()


FIRST_NOTICE_S = 60.0
RAREST_NOTICE_S = 1800.0
_SLOWEST_RETRY_S = 5.0

Say = Callable[..., None]
"""Called with who, waits_for, seconds, unblocked_by and over (whether the wait has ended)."""


def print_notice(**notice: Any) -> None:
    """A notice on stderr."""
    print(notice_line(notice), file=sys.stderr, flush=True)


def noted_in(event: Callable[..., None]) -> Say:
    """Prints each notice and writes it as an event; `event` is that of an EventLog."""

    def say(**notice: Any) -> None:
        print_notice(**notice)
        event("no_progress", **notice)

    return say


def notice_line(notice: dict[str, Any]) -> str:
    """A notice for people."""
    if notice["over"]:
        return f"{notice['who']} goes on after {notice['seconds']:.0f} s"
    return (
        f"no progress for {notice['seconds']:.0f} s: {notice['who']} waits for {notice['waits_for']}; "
        f"what would end the wait: {notice['unblocked_by']}"
    )


@dataclass
class Patience:
    """Says when a wait makes no progress: after a minute, and then ever more rarely. Not for several threads.

        patience = Patience(say, "the collector", "the learner's publish")       one for each kind of wait of a loop
        while not there():
            patience.still("version 13 (published: 12)")    says now and then what is waited for, and what would end it
            sleep(pause_s)
        patience.progress()

    Where waits of a kind usually take longer, such as those for a step of a large model, one is noticed when it takes
    twice as long as any before. A notice is for people, as events are: no process decides anything by it.
    """

    say: Say
    who: str
    unblocked_by: str
    first_s: float = FIRST_NOTICE_S
    _since: float | None = field(init=False, default=None)
    """When the first look found no progress; None while there is no wait."""
    _longest_s: float = field(init=False, default=0.0)
    _due_s: float = field(init=False, default=0.0)
    _told: bool = field(init=False, default=False)

    def still(self, waits_for: str) -> None:
        """Call it at each look at which nothing has changed."""
        now = time.monotonic()
        if self._since is None:
            self._since, self._told = now, False
            self._due_s = max(self.first_s, 2.0 * self._longest_s)
        waited_s = now - self._since
        if waited_s >= self._due_s:
            self.say(who=self.who, waits_for=waits_for, seconds=waited_s, unblocked_by=self.unblocked_by, over=False)
            self._told, self._due_s = True, waited_s + min(waited_s, RAREST_NOTICE_S)

    def progress(self) -> None:
        """Call it when something has changed: the wait has ended."""
        if self._since is None:
            return
        waited_s, self._since = time.monotonic() - self._since, None
        self._longest_s = max(self._longest_s, waited_s)
        if self._told:
            self.say(who=self.who, waits_for="", seconds=waited_s, unblocked_by=self.unblocked_by, over=True)


def retry_pause_s(first_s: float, failures: int) -> float:
    """The pause after so many failures in a row, 1 or more: it doubles, up to some seconds."""
    return min(first_s * 2.0 ** min(failures - 1, 16), _SLOWEST_RETRY_S)
