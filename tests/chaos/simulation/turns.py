"""An event loop on virtual time: where it would wait for the network, the other processes have their turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tests.chaos.simulation.world import Killed, World

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
