"""Prompts follow the engines: an engine that joins or comes back is filled at once, and the fullest gets the fewest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.background import Patience
from pipeline.data.batch import Prompt, Sampling
from pipeline.data.event_log import EventLog
from pipeline.data.membership import Member, Membership
from pipeline.data.run_directory import RunDirectory
from pipeline.rollout.group_sampler import GroupSampler
from pipeline.rollout.slots import Slots
from rollout_sglang import fleet as fleet_module
from rollout_sglang.fleet import Fleet
from tests.doubles.sglang_double import KV_TOKENS, EngineDouble
from tests.support.fleets import settings

FOREVER_S = 3600.0
SAMPLING = Sampling(max_new_tokens=2)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "PERIOD_S", 0.05)


class Asking:
    """Prompts that are asked for the whole of a test, over a fleet that is monitored."""

    def __init__(self, folder: Path, slots: Slots) -> None:
        self.membership = Membership(folder / "engines")
        self.fleet = Fleet(self.membership, **settings(folder))
        self.policy = RunDirectory(folder).policy_directory(3)
        self.sampler = GroupSampler(
            engines=self.fleet,
            slots=slots,
            resync=lambda: self.fleet.resync(3, self.policy),
            event_log=EventLog(folder, "collector-000001"),
            interruption=None,
            deadline_s=60.0,
            retry_s=0.01,
            patience=Patience(lambda *_, **__: None, "the test", "engines"),
        )

    async def sample(self, group: int) -> Any:
        prompt = Prompt(group=group, text="p", answer="a", tokens=(1, 2))
        return await self.sampler.sample(prompt, 1, SAMPLING, priority=(0, group), allowed=lambda _: True)


@asynccontextmanager
async def asking(folder: Path, slots: Slots, prompts: int = 0) -> AsyncIterator[Asking]:
    this = Asking(folder, slots)
    async with this.fleet.monitored(lambda: (3, this.policy), slots):
        tasks = [asyncio.create_task(this.sample(group)) for group in range(prompts)]
        try:
            yield this
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    await this.fleet.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def in_flight(asked: Asking) -> list[int]:
    return [one.in_flight for one in asked.fleet.state()]


def test_an_engine_that_joins_is_filled_at_its_admission(tmp_path: Path) -> None:
    """Without a further look, and though no earlier engine ever answers."""

    async def run(urls: list[str]) -> None:
        this = Asking(tmp_path, slots := Slots(8, engines=2))
        pool, asked = this.fleet._pool, list[asyncio.Task[Any]]()
        pool.in_flight = slots
        for index, url in enumerate(urls):
            this.membership.announce(Member(index, url, 1))
            await pool.refresh()
            await pool.admit(pool[index], 3)
            asked = asked or [asyncio.create_task(this.sample(group)) for group in range(20)]
            await until(lambda index=index: in_flight(this) == [4] * (index + 1))  # type: ignore[misc]
            assert slots.held == 4 * (index + 1)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await this.fleet.close()

    with EngineDouble(3) as first, EngineDouble(3) as second:
        first.token_s = second.token_s = FOREVER_S
        asyncio.run(run([first.url, second.url]))


def test_prompts_of_an_engine_that_is_gone_wait_for_it_instead_of_crowding_the_others(tmp_path: Path) -> None:
    async def run(first: EngineDouble, second: EngineDouble) -> None:
        slots = Slots(8, engines=2)
        async with asking(tmp_path, slots, prompts=8) as this:
            this.membership.announce(Member(0, first.url, 1))
            this.membership.announce(well := Member(1, second.url, 1))
            await until(lambda: in_flight(this) == [4, 4])
            this.membership.announce(replace(well, silent="its process 7 is stopped"))
            await until(lambda: slots.num_waiting == 4)
            assert (slots.held, slots.number, in_flight(this)) == (4, 4, [4, 0])
            this.membership.announce(well)
            await until(lambda: in_flight(this) == [4, 4])
            assert first.calls.count("POST /generate") == 4

    with EngineDouble(3) as first, EngineDouble(3) as second:
        first.token_s = second.token_s = FOREVER_S
        asyncio.run(run(first, second))


def test_a_prompt_goes_to_the_engine_with_the_fewest_live_tokens(tmp_path: Path) -> None:
    async def run(first: EngineDouble, second: EngineDouble) -> None:
        first.token_s, first.kv_use = FOREVER_S, 0.5
        async with asking(tmp_path, Slots(99, engines=2), prompts=1) as this:
            this.membership.announce(Member(0, first.url, 1))
            await until(lambda: in_flight(this) == [1])
            second.token_s, second.kv_use = FOREVER_S, 0.9
            this.membership.announce(Member(1, second.url, 1))
            await until(lambda: [one.quarantined for one in this.fleet.state()] == [False, False])
            asked = asyncio.create_task(this.sample(1))
            await until(lambda: sum(in_flight(this)) == 2)
            assert in_flight(this) == [2, 0]
            assert [one.load.live_tokens for one in this.fleet.state() if one.load] == [KV_TOKENS // 2, 943718]
            asked.cancel()

    with EngineDouble(3) as first, EngineDouble(3) as second:
        asyncio.run(run(first, second))


def test_an_engine_without_requests_is_not_asked_for_its_load(tmp_path: Path) -> None:
    async def run(engine: EngineDouble) -> None:
        async with asking(tmp_path, Slots(8)) as this:
            this.membership.announce(Member(0, engine.url, 1))
            await until(lambda: [one.quarantined for one in this.fleet.state()] == [False])
            engine.calls.clear()
            await until(lambda: engine.calls.count("GET /model_info") >= 5)
            assert "GET /v1/loads" not in engine.calls
            engine.token_s = FOREVER_S
            asked = asyncio.create_task(this.sample(0))
            await until(lambda: engine.calls.count("GET /v1/loads") >= 2)
            asked.cancel()

    with EngineDouble(3) as engine:
        asyncio.run(run(engine))


def test_an_engine_that_tells_no_load_gets_as_many_prompts_as_the_ceiling_says(tmp_path: Path) -> None:
    async def run(engine: EngineDouble) -> None:
        slots = Slots(8, engines=2)
        async with asking(tmp_path, slots, prompts=20) as this:
            this.membership.announce(Member(0, engine.url, 1))
            await until(lambda: in_flight(this) == [8])
            await until(lambda: engine.calls.count("GET /v1/loads") >= 2)
            assert slots.number == 8

    with EngineDouble(3) as engine:
        route, engine.token_s = engine.route, FOREVER_S
        engine.route = lambda method, path, request: (  # type: ignore[method-assign]
            (404, {"detail": "Not Found"}) if path == "/v1/loads" else route(method, path, request)
        )
        asyncio.run(run(engine))


def test_a_full_engine_gets_fewer_prompts_and_more_again_when_it_has_room(tmp_path: Path) -> None:
    async def run(engine: EngineDouble) -> None:
        slots, engine.token_s = Slots(10), 0.02
        async with asking(tmp_path, slots) as this:

            async def ask(worker: int) -> None:
                for group in range(10_000):
                    await this.sample(10_000 * worker + group)

            this.membership.announce(Member(0, engine.url, 1))
            tasks = [asyncio.create_task(ask(worker)) for worker in range(20)]
            await until(lambda: in_flight(this) == [10])
            engine.kv_use = 1.0
            await until(lambda: slots.number <= 4)
            engine.kv_use = 0.3
            await until(lambda: in_flight(this) == [10])
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    with EngineDouble(3) as engine:
        asyncio.run(run(engine))
