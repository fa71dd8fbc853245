"""Slots are given by priority, never lost, never given twice; and there are as many as the engines have room for."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.ports.load import EngineLoad
from pipeline.rollout.slots import Priority, Slots, growth


def load(kv_use: float, *, running: int = 10, waiting: int = 0) -> EngineLoad:
    return EngineLoad(running=running, waiting=waiting, live_tokens=round(1000 * kv_use), kv_tokens=1000, kv_use=kv_use)


def test_the_smallest_turn_goes_first_and_equal_turns_by_arrival() -> None:
    served: list[str] = []

    async def ask(slots: Slots, priority: Priority, name: str) -> None:
        async with slots.acquire(priority):
            served.append(name)
            await asyncio.sleep(0)

    async def run() -> None:
        slots = Slots(1)
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

    async def work(slots: Slots) -> None:
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
        slots = Slots(number)
        under_way = [asyncio.create_task(work(slots)) for _ in range(tasks)]
        for _ in range(tasks):
            rng.choice(under_way).cancel()
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
        results = await asyncio.gather(*under_way, return_exceptions=True)
        assert not [r for r in results if isinstance(r, AssertionError)]
        async with asyncio.timeout(5):
            await asyncio.gather(*(slots.acquire((0, 0)).__aenter__() for _ in range(number)))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("kv_use", "waiting", "expected"),
    [
        (0.0, 0, 1.0),
        (0.79, 0, 1.0),
        (0.79, 5, 1.0),
        (0.79, 6, 0.0),
        (0.8, 0, 0.0),
        (0.94, 9, 0.0),
        (0.95, 0, 0.8 / 0.95 - 1),
        (1.0, 9, -0.2),
    ],
)
def test_an_engine_takes_more_below_80_percent_and_fewer_from_95_percent(
    kv_use: float, waiting: int, expected: float
) -> None:
    assert growth(load(kv_use, waiting=waiting)) == pytest.approx(expected)


async def hold(slots: Slots, stack: AsyncExitStack, prompts: int) -> list[int]:
    return [await stack.enter_async_context(slots.acquire((0, group))) for group in range(prompts)]


def test_slots_rise_with_answers_up_to_80_percent_and_the_ceiling_while_prompts_wait() -> None:
    async def run() -> list[int]:
        slots, numbers = Slots(64), list[int]()
        async with AsyncExitStack() as stack:
            slots.observe([load(0.5)])
            asked = await hold(slots, stack, 10)
            slots.observe([load(1.0)])
            numbers.append(slots.number)
            slots.observe([load(0.3)])
            slots.answered(asked[0], 0)
            numbers.append(slots.number)  # nobody waits for more
            waiting = [asyncio.create_task(slots.acquire((1, group)).__aenter__()) for group in range(99)]
            await asyncio.sleep(0)
            for kv_use, answers in ((0.79, 8), (0.8, 8), (0.94, 8), (0.3, 99)):
                slots.observe([load(kv_use)])
                for _ in range(answers):
                    slots.answered(asked[0], 0)
                numbers.append(slots.number)
            for task in waiting:
                task.cancel()
        return numbers

    assert asyncio.run(run()) == [8, 8, 16, 16, 16, 64]


def test_a_full_engine_goes_at_once_to_what_it_holds_at_80_percent_but_not_twice_for_the_same_prompts() -> None:
    async def run() -> list[int]:
        slots, numbers = Slots(100), list[int]()
        async with AsyncExitStack() as stack:
            slots.observe([load(0.5)])
            await hold(slots, stack, 100)
            for kv_use in (1.0, 1.0, 0.96, 0.9):
                slots.observe([load(kv_use)])
                numbers.append(slots.number)
        slots.observe([load(1.0)])
        return [*numbers, slots.number]

    assert asyncio.run(run()) == [80, 80, 80, 80, 1], "then nothing is under way: it is full of somebody else's"


def test_one_full_engine_of_four_costs_its_own_part() -> None:
    async def run() -> int:
        slots = Slots(100, engines=4)
        async with AsyncExitStack() as stack:
            slots.observe([load(0.5)] * 4)
            await hold(slots, stack, 100)
            slots.observe([load(0.5), load(0.5), load(1.0), load(0.9)])
            assert slots.is_overdrawn
            return slots.number

    assert asyncio.run(run()) == 95


def test_a_retraction_counts_once_for_the_prompts_that_were_under_way_together() -> None:
    async def run() -> list[int]:
        slots, numbers = Slots(100), list[int]()
        slots.observe([load(0.5)])
        async with AsyncExitStack() as rest:
            asked = await hold(slots, rest, 40)
            async with AsyncExitStack() as stack:
                asked += await hold(slots, stack, 60)
                slots.answered(asked[0], 2)
                numbers.append(slots.number)
            slots.answered(asked[1], 2)
            numbers.append(slots.number)
            assert numbers == [84, 84]
            [later] = await hold(slots, rest, 1)
            slots.answered(later, 1)
            numbers.append(slots.number)
        assert slots.figures() == dict(in_flight=34, retractions=5, kv_use=0.5)
        assert slots.figures()["retractions"] == 0
        return numbers

    assert asyncio.run(run())[-1] == 34


def test_an_engine_that_leaves_takes_its_share_and_brings_it_back_to_those_that_wait() -> None:
    async def run() -> None:
        slots = Slots(8, engines=2)
        slots.observe([load(0.5), load(0.5)])
        async with AsyncExitStack() as stack:
            await hold(slots, stack, 8)
            slots.observe([load(0.5)])
            assert (slots.number, slots.is_overdrawn) == (4, True)
            waiting = asyncio.create_task(slots.acquire((1, 0)).__aenter__())
            await asyncio.sleep(0)
            assert not waiting.done()
        await waiting
        for _ in range(20):
            slots.answered(0, 0)
        assert slots.number == 4, "the other engine's share is kept for it"
        slots.observe([load(0.5), load(0.0)])
        assert slots.number == 8
        slots.observe([])
        assert slots.number == 1, "one prompt waits for the first engine"

    asyncio.run(run())


def test_engines_that_tell_nothing_leave_the_ceiling_as_it_is() -> None:
    async def run() -> None:
        slots = Slots(8, engines=4)
        slots.observe([None, None])
        async with AsyncExitStack() as stack:
            asked = await hold(slots, stack, 8)
            slots.answered(asked[0], 3)
            slots.observe([None])
            assert slots.number == 8
        assert slots.figures() == dict(in_flight=8, retractions=3)

    asyncio.run(run())
