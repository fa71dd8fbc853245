"""The pool of engines while several callers refresh it at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.data.membership import Member, Membership
from rollout_sglang.engine_pool import EnginePool, RouterClient
from tests.support.fleets import members

URL = "http://127.0.0.1:1"


class SlowRouter(RouterClient):
    """Its worker is removed once `go` is set."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:2", None)
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def admit(self, engine_url: str) -> None:
        """It takes any."""

    async def remove(self, engine_url: str) -> None:
        self.asked.set()
        await self.go.wait()


def pool_of(membership: Membership, told: list[tuple[str, int]]) -> EnginePool:
    return EnginePool(membership, None, 1.0, lambda what, engine, **_: told.append((what, engine)))


def test_two_refreshes_at_once_see_one_engine_leave_and_its_next_start_join(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []

    async def main() -> tuple[int, str | None]:
        membership = members(tmp_path, (), "http://127.0.0.1:2")
        membership.announce(Member(0, URL, started=1))
        pool = pool_of(membership, told)
        await pool.refresh()
        pool.router = router = SlowRouter()
        await pool.admit(pool[0], 0)
        membership.announce(Member(0, URL, started=2))
        first = asyncio.create_task(pool.refresh())
        await router.asked.wait()
        second = asyncio.create_task(pool.refresh())
        await asyncio.sleep(0.1)
        router.go.set()
        await asyncio.gather(first, second)
        await pool.close()
        return pool[0].member.started, pool[0].quarantined

    started, quarantined = asyncio.run(main())
    assert (started, quarantined) == (2, "it has joined and is not verified yet")
    assert told == [("joined", 0), ("admitted", 0), ("quarantined", 0), ("left", 0), ("joined", 0)]


def test_a_refresh_that_took_longer_takes_nothing_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It read the membership before another call did, and comes back after it."""
    membership = members(tmp_path, ())
    membership.announce(Member(0, URL, started=1))
    pool, has_read, late = pool_of(membership, []), threading.Event(), threading.Event()

    def slow() -> Sequence[Member]:
        found = membership.engines()
        if not has_read.is_set():
            has_read.set()
            assert late.wait(20.0)
        return found

    async def main() -> int:
        monkeypatch.setattr(pool._listed, "engines", slow)
        first = asyncio.create_task(pool.refresh())
        await asyncio.to_thread(has_read.wait)
        membership.announce(Member(0, URL, started=2))
        await pool.refresh()
        late.set()
        await first
        await pool.close()
        return pool[0].member.started

    assert asyncio.run(main()) == 2
