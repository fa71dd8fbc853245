"""PrioritySemaphore are given by priority, never lost, and never given twice."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.rollout.priority_semaphore import Priority, PrioritySemaphore, gather_or_cancel


def test_the_smallest_turn_goes_first_and_equal_turns_by_arrival() -> None:
    served: list[str] = []

    async def ask(slots: PrioritySemaphore, priority: Priority, name: str) -> None:
        async with slots.acquire(priority):
            served.append(name)
            await asyncio.sleep(0)

    async def run() -> None:
        slots = PrioritySemaphore(1)
        async with slots.acquire((9, 9)):
            turns = [((2, 0), "d"), ((1, 5), "b"), ((0, 7), "a"), ((1, 5), "c")]
            waiting = [asyncio.create_task(ask(slots, *priority)) for priority in turns]
            await asyncio.sleep(0)
            assert served == []
            assert slots.num_waiting == 4
        await asyncio.gather(*waiting)
        assert slots.num_waiting == 0

    asyncio.run(run())
    assert served == ["a", "b", "c", "d"]


@given(seed=st.integers(0, 10_000), number=st.integers(1, 3), tasks=st.integers(1, 12))
def test_cancelled_waiters_and_holders_lose_no_slot(seed: int, number: int, tasks: int) -> None:
    """Whatever is cancelled whenever: never more holders than slots, and in the end every slot is free."""
    rng = random.Random(seed)
    holders = 0

    async def work(slots: PrioritySemaphore) -> None:
        nonlocal holders
        async with slots.acquire((rng.randrange(3), 0)):
            holders += 1
            assert holders <= number
            try:
                for _ in range(rng.randrange(3)):
                    await asyncio.sleep(0)
            finally:
                holders -= 1

    async def run() -> None:
        slots = PrioritySemaphore(number)
        under_way = [asyncio.create_task(work(slots)) for _ in range(tasks)]
        for _ in range(tasks):
            rng.choice(under_way).cancel()
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
        results = await asyncio.gather(*under_way, return_exceptions=True)
        assert not [r for r in results if isinstance(r, AssertionError)]
        async with asyncio.timeout(5):
            await asyncio.gather(*(slots._take((0, 0)) for _ in range(number)))

    asyncio.run(run())


def test_gather_or_cancel_leaves_nothing_running() -> None:
    async def run() -> list[str]:
        ended: list[str] = []

        async def slow() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append("slow")

        async def fails() -> None:
            await asyncio.sleep(0)
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await gather_or_cancel([slow(), fails()])
        return ended

    assert asyncio.run(run()) == ["slow"]


def test_gather_or_cancel_is_cancelled_with_its_caller() -> None:
    async def run() -> list[str]:
        ended: list[str] = []

        async def slow(name: str) -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(name)

        caller = asyncio.create_task(gather_or_cancel([slow("first"), slow("second")]))
        await asyncio.sleep(0.01)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        return ended

    assert sorted(asyncio.run(run())) == ["first", "second"]


def test_a_cancelled_caller_gets_the_cancellation_whatever_failed() -> None:
    async def fails_when_cancelled() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise ValueError("no")

    async def run() -> None:
        caller = asyncio.create_task(gather_or_cancel([fails_when_cancelled()]))
        await asyncio.sleep(0.01)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert caller.cancelled()

    asyncio.run(run())


def test_gather_or_cancel_keeps_the_order() -> None:
    async def value(number: int) -> int:
        await asyncio.sleep(0.01 * (3 - number))
        return number

    async def run() -> list[int]:
        return await gather_or_cancel([value(number) for number in range(3)])

    assert asyncio.run(run()) == [0, 1, 2]


def test_the_loop_has_its_turn_after_the_beginning_of_each() -> None:
    """A hundred requests that begin in one turn of the loop stop it for as long as all of them take to begin."""
    turns, begun = [0], list[int]()

    async def tick() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    async def begin() -> None:
        begun.append(turns[0])

    async def run() -> None:
        ticking = asyncio.create_task(tick())
        await gather_or_cancel([begin() for _ in range(10)])
        ticking.cancel()

    asyncio.run(run())
    assert len(set(begun)) == 10


def test_what_had_not_begun_when_the_caller_was_cancelled_never_does() -> None:
    begun: list[int] = []

    async def begin(number: int) -> None:
        begun.append(number)
        await asyncio.sleep(60)

    async def run() -> None:
        caller = asyncio.create_task(gather_or_cancel([begin(number) for number in range(10)]))
        while len(begun) < 3:
            await asyncio.sleep(0)
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)

    asyncio.run(run())
    assert len(begun) < 10
