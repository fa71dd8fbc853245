"""Virtual time, and processes that take turns: exactly one runs, and the seed decides which one is next.

A process of the simulation is a greenlet. It runs until it sleeps or until a point (a file operation, a turn of its
event loop) at which a fault of the plan is due, or at which the seed lets others run first. Then the one whose time has
come goes on. No process ever runs beside another one, so one seed gives one history.

A killed process gets `Killed` at its point, and at every later one: what unwinds of it can change nothing any more.
"""

from __future__ import annotations

import _thread
import asyncio
import hashlib
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import greenlet

from tests.chaos.simulation.plan import Fault, Plan

OPERATION_S = 1e-4
"""What a point takes: a process that only looks, without sleeping, gets no further in no time."""
MOST_POINTS = 60_000
LATEST_S = 30_000.0
EPOCH_S = 1_750_000_000.0
"""The time of day when a simulation begins, in seconds since 1970."""


class Killed(BaseException):
    """kill -9 of the process that runs; no handler of the product catches it."""


class Stack:
    """The stack of a process, which runs its body when it is first given the turn. What Python keeps by thread, and
    asyncio uses, is kept by stack."""

    def __init__(self, body: Callable[[], None] | None = None) -> None:
        """Without a body: that of the caller."""
        self._green = greenlet.getcurrent() if body is None else greenlet.greenlet(lambda *_: body())
        if body is not None:
            ground: Any = greenlet.getcurrent()
            while ground.parent is not None:
                ground = ground.parent
            self._green.parent = ground

    def give(self, to: Stack) -> None:
        """The caller, whose stack this is, waits until it is given the turn itself."""
        loop, hooks = asyncio._get_running_loop(), sys.get_asyncgen_hooks()
        asyncio._set_running_loop(None)
        to._green.switch()
        asyncio._set_running_loop(loop)
        sys.set_asyncgen_hooks(*hooks)

    def leave(self, to: Stack) -> None:
        """The caller, whose stack this is, has ended; nothing but a return may follow."""
        self._green.parent = to._green


class Process:
    """One start of a role; `operator` is the one that is no part of the machine."""

    def __init__(self, role: str, number: int, host: str, owner: Process | None = None) -> None:
        """With an `owner`, it is a thread of that process: it dies and ends with it."""
        self.role = role
        self.owner = owner
        self._killed = False
        self.name = f"{role}.{number}"
        self.host = host
        self.status: int | None = None
        """Exit status; None while it lives. -9: killed."""
        self.error: BaseException | None = None
        self.stop_requested = False
        self.unwinding = False
        self.wake: tuple[float, float] = (0.0, 0.0)
        """(virtual seconds, a draw that decides between two of the same time)."""
        self.stack: Stack
        self.began = 0.0
        self.ident = 0
        """Of its thread."""

        self.frozen = False
        self.replaced = False
        """Frozen, and given up: its role is started again elsewhere."""

    @property
    def dead(self) -> bool:
        """It was killed, and may not have unwound yet."""
        owner = self.owner
        return self._killed or (owner is not None and (owner.dead or owner.status is not None))

    @dead.setter
    def dead(self, killed: bool) -> None:
        self._killed = killed


class World:
    """The clock, the processes and the trace of one simulation."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.now = 0.0
        self.clock_offset = EPOCH_S
        """Of time.time; faults change it."""
        self.processes: list[Process] = []
        self.current: Process | None = None
        self.points = 0
        self.counts: Counter[tuple[str, str]] = Counter()
        """(role, operation) → how often it was reached; "refused": by a full disk."""
        self.problems: list[str] = []
        self.happened: list[str] = []
        """Faults that struck."""
        self.trace: list[str] | None = None
        self.digest = hashlib.sha256()
        self.full_until = -1.0
        """No space is left on the device until then."""
        self.power_cut: Fault | None = None
        self.schedule_random = random.Random(f"schedule {plan.seed}")
        self.names_random = random.Random(f"names {plan.seed}")
        self._pending = list(plan.faults)
        self.started = 0
        self.ends = False
        self.root = "?"
        """Where its disk lies."""

    def random(self, what: str) -> random.Random:
        """A stream of its own for each part of the simulation: leaving out a fault changes no other draw."""
        return random.Random(f"{what} {self.plan.seed}")

    # ---- processes

    def start(
        self,
        role: str,
        body: Callable[[Process], int],
        delay_s: float = 0.0,
        host: str = "a",
        owner: Process | None = None,
    ) -> Process:
        """Begin a process in `delay_s`, or a thread of `owner`; `body` returns its exit status."""
        self.started += 1
        process = Process(role, self.started, host, owner)
        process.began = self.now + delay_s
        process.wake = (process.began, self.schedule_random.random())
        self.processes.append(process)

        def run() -> None:
            process.ident = _thread.get_ident()
            try:
                if process.dead:
                    raise Killed
                process.status = body(process)
            except Killed:
                process.status = -9
            except BaseException as error:  # noqa: BLE001 (a bug of the product or of the simulation: the verdict names it)
                process.status, process.error = 1, error
                if role not in ("collector", "learner", "delivery", "writer"):  # of those, the operator judges
                    self.problem(f"the {role} failed: {self.said(error)}")
            self.note(process.name, "ends", f"{process.status} {self.said(process.error)}")
            self.processes.remove(process)
            following = self._next()
            process.stack.leave(self._ground if following is None else following.stack)

        process.stack = Stack(run)
        return process

    def run(self, body: Callable[[Process], int]) -> None:
        """Run the operator, and everything that it starts, to the end."""
        self._ground = Stack()
        self.start("operator", body)
        following = self._next()
        assert following is not None
        self._ground.give(following.stack)

    def kill(self, process: Process) -> None:
        """It unwinds next, before anything else happens."""
        process.dead = True
        process.wake = (-math.inf, 0.0)

    def sleep(self, seconds: float) -> None:
        """The process that runs lets the others run for `seconds`. Raises Killed."""
        me = self.me()
        if me.dead:
            if me.unwinding:
                return
            raise Killed
        me.wake = (self.now + max(0.0, seconds), self.schedule_random.random())
        following = self._next()
        if following is not me:
            assert following is not None
            me.stack.give(following.stack)
        if me.dead:
            raise Killed

    def me(self) -> Process:
        """The process that runs."""
        assert self.current is not None
        return self.current

    def is_mine(self) -> bool:
        """Whether the calling thread is the process that runs (others belong to libraries, or to the test)."""
        return self.current is not None and self.current.ident == _thread.get_ident()

    def _next(self) -> Process | None:
        """Whose turn it is; None when all have ended."""
        self.current = min(self.processes, key=lambda process: process.wake) if self.processes else None
        if self.current is not None:
            self.now = max(self.now, self.current.wake[0])
        return self.current

    # ---- points

    def point(self, operation: str, what: str = "") -> None:
        """Something is about to be done that others can see, or that takes time. Raises Killed, and OSError where the
        disk is full."""
        me = self.me()
        if me.dead:
            if me.unwinding and operation == "turn":
                return
            raise Killed
        if me.role == "operator":
            return
        self.now += OPERATION_S
        self.points += 1
        if operation != "turn":
            self.note(me.name, operation, what)
        if self.points > MOST_POINTS or self.now > LATEST_S:
            self.end(f"no end after {self.points} operations and {self.now:.0f} virtual seconds")
        self.counts[me.role, operation] += 1
        self.counts[me.role, "any"] += 1
        if self._pending:
            self._strike(me, operation)
        if self.schedule_random.random() < self.plan.preemption:
            self.sleep(10 ** self.schedule_random.uniform(-3, 0.7))

    def end(self, why: str) -> None:
        """Give up this simulation: everything dies."""
        self.problem(why)
        self.ends = True
        for process in self.processes:
            self.kill(process)
        raise Killed

    def problem(self, what: str) -> None:
        """An invariant does not hold."""
        self.problems.append(what)
        self.note("!", "PROBLEM", what)

    def said(self, error: BaseException | None) -> str:
        """The error without the name of the temporary folder."""
        return "" if error is None else f"{type(error).__name__}: {error}".replace(self.root, "")

    def note(self, who: str, operation: str, what: str) -> None:
        """A line of the trace."""
        line = f"{self.now:12.4f}  {who:14} {operation:10} {what}"
        self.digest.update(line.encode())
        if self.trace is not None:
            self.trace.append(line)

    def _strike(self, me: Process, operation: str) -> None:
        for fault in self._pending:
            is_here = fault.role == me.role and fault.operation in (operation, "any")
            if is_here and self.counts[me.role, fault.operation] >= fault.count:
                self._pending.remove(fault)
                self.happened.append(fault.kind)
                self.note(me.name, "FAULT", str(fault))
                self._apply(fault, me)
                return

    def _apply(self, fault: Fault, me: Process) -> None:
        match fault.kind:
            case "kill":
                me.dead = True
            case "kill both":
                self._kill_all(lambda process: process.role in ("collector", "learner"))
            case "power cut":
                self.power_cut = fault
                self._kill_all(lambda process: process.role != "operator")
            case "freeze":
                me.frozen, me.replaced = True, fault.replaced
                self.sleep(fault.seconds)
                me.frozen = False
                self.note(me.name, "THAWS", "")
            case "full":
                self.full_until = self.now + fault.seconds
            case "clock":
                self.clock_offset += fault.seconds
            case "stop":
                me.stop_requested = True
            case _:
                raise AssertionError(fault.kind)
        if me.dead:
            raise Killed

    def _kill_all(self, which: Callable[[Process], bool]) -> None:
        for process in self.processes:
            if which(process):
                self.kill(process)


T = TypeVar("T")
_FOREVER_S = 3_600.0
_LAST_TURNS = 20


def run_loop(world: World, work: Coroutine[Any, Any, T], every_turn: Callable[[], None] = lambda: None) -> T:
    """As asyncio.run, in the process that runs. `every_turn` is called between turns. Raises Killed."""
    loop = VirtualLoop(world, every_turn)
    try:
        return loop.run_until_complete(work)
    finally:
        loop.throw_away()


class VirtualLoop(asyncio.BaseEventLoop):
    """Its selector waits by sleeping in the world. What is given to threads runs in one go, a little later."""

    def __init__(self, world: World, every_turn: Callable[[], None]) -> None:
        super().__init__()
        self._world = world
        self._every_turn = every_turn
        self._threads = world.random(f"threads {world.me().name}")
        self._selector = self
        self.set_exception_handler(lambda loop, context: None)

    def time(self) -> float:
        return self._world.now

    def select(self, timeout: float | None) -> list[Any]:
        """What a selector does; called once a turn."""
        world = self._world
        if world.me().unwinding:
            return []
        if world.me().dead:
            raise Killed
        self._every_turn()
        world.point("turn")
        if timeout is None or timeout > 0:
            world.sleep(_FOREVER_S if timeout is None else timeout)
        return []

    def throw_away(self) -> None:
        """Whatever is still under way is cancelled. In a dead process that changes nothing that others can see."""
        me = self._world.me()
        me.unwinding = me.dead
        tasks = asyncio.all_tasks(self)
        for _ in range(_LAST_TURNS):
            tasks = {task for task in tasks if not task.done()}
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            self.call_soon(self.stop)
            self.run_forever()
        for task in tasks:
            task.get_coro().close()  # type: ignore[union-attr]
        self.close()
        me.unwinding = False

    def close(self) -> None:
        if not self.is_closed():
            super().close()

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """A thread that has its turn at some time, and is not interrupted then."""
        done: asyncio.Future[T] = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 (the caller's, as from a thread)
                if not done.cancelled():
                    done.set_exception(error)
            else:
                if not done.cancelled():
                    done.set_result(result)

        self.call_later(self._threads.expovariate(200.0), work)
        return done

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass
