"""A monitored fleet: engines that join, leave, fall silent, come back, and a router that is started again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.checksums import list_checksums
from pipeline.data.membership import Member, Membership
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import FatalError, SupersededError
from pipeline.ports.engines import Sampling
from pipeline.ports.weights import WeightCheck
from rollout_sglang import engine_pool, monitor, transport
from rollout_sglang.client import EngineClient
from rollout_sglang.fleet import Fleet
from rollout_sglang.monitor import Monitor
from rollout_sglang.protocol import ModelInfo
from rollout_sglang.weights.update_lease import Updates
from tests.doubles.sglang_double import EngineDouble, RouterDouble
from tests.support.fleets import fleet_of, settings

SAMPLING = Sampling(max_new_tokens=2)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "PERIOD_S", 0.05)


def policy(run: Path, version: int) -> Path:
    return RunDirectory(run).policy_directory(version)


def save(check: WeightCheck, run: Path) -> None:
    folder = policy(run, check.version)
    folder.mkdir(parents=True)
    check.save(folder)
    list_checksums(folder)


def monitored(
    run: Path, act: Callable[[Fleet, Membership], Awaitable[None]], published: Callable[[], int] = lambda: 3
) -> list[tuple[str, Any]]:
    """What happened to which engine."""
    changes: list[tuple[str, Any]] = []
    membership = Membership(run / "engines")

    async def main() -> None:
        taken = settings(run, deadline_s=60, load_deadline_s=20)
        taken["on_change"] = lambda kind, **fields: changes.append((kind, fields["engine"]))
        fleet = Fleet(membership, **taken)
        try:
            async with fleet.monitored(lambda: (published(), policy(run, published()))):
                await act(fleet, membership)
        finally:
            await fleet.close()

    asyncio.run(main())
    return changes


async def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends, "it never happened"
        await asyncio.sleep(0.02)


def test_generation_waits_for_a_first_engine_which_is_given_weights_first(tmp_path: Path) -> None:
    with EngineDouble() as engine:
        engine.version = "unverified-0"

        async def act(fleet: Fleet, membership: Membership) -> None:
            waiting = asyncio.create_task(fleet.generate([1], 1, SAMPLING))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            membership.announce(Member(4, engine.url))
            [completion] = await waiting
            assert (completion.engine, completion.versions.tolist()) == (4, [3, 3])

        assert monitored(tmp_path, act) == [("joined", 4), ("admitted", 4)]
        assert engine.calls.index("POST /generate") > engine.calls.index("POST /update_weights_from_disk")


def test_an_engine_that_left_gets_no_requests_and_one_that_moved_is_verified_anew(tmp_path: Path) -> None:
    with EngineDouble(3) as old, EngineDouble(3) as new:

        async def act(fleet: Fleet, membership: Membership) -> None:
            membership.announce(Member(0, old.url, 1))
            await until(lambda: [(one.version, one.quarantined) for one in fleet.state()] == [(3, False)])
            membership.announce(Member(0, new.url, 2))
            await until(lambda: [(one.url, one.quarantined) for one in fleet.state()] == [(new.url, False)])
            membership.withdraw(Member(0, new.url, 2))
            await until(lambda: fleet.state() == ())

        changes = monitored(tmp_path, act)
    one_start = [("joined", 0), ("admitted", 0), ("quarantined", 0), ("left", 0)]
    assert changes == one_start * 2


def test_a_silent_engine_is_quarantined_and_its_requests_are_asked_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a cable that was cut: nothing is refused, nothing answered."""
    monkeypatch.setattr(monitor, "SILENCE_S", 2.0)
    monkeypatch.setattr(transport, "LOOK_DEADLINE_S", 0.8)
    monkeypatch.setattr("rollout_sglang.engine_pool.LOOK_DEADLINE_S", 0.8)
    with EngineDouble(3) as silent, EngineDouble(3) as other:

        async def act(fleet: Fleet, membership: Membership) -> None:
            membership.announce(Member(0, silent.url))
            await until(lambda: len(fleet.state()) == 1 and not fleet.state()[0].quarantined)
            route, silent.route = silent.route, lambda *_: silent._released.wait(30) and None  # type: ignore[method-assign, func-returns-value]
            waiting = asyncio.create_task(fleet.generate([1], 1, SAMPLING))
            await until(lambda: fleet.state()[0].quarantined)
            membership.announce(Member(1, other.url))
            assert (await waiting)[0].engine == 1
            silent._released.set()
            silent.route = route  # type: ignore[method-assign]
            await until(lambda: not fleet.state()[0].quarantined)

        changes = monitored(tmp_path, act)
    states = [change for change, _ in groupby(changes)]
    assert states == [
        *[("joined", 0), ("admitted", 0), ("quarantined", 0)],
        *[("joined", 1), ("admitted", 1), ("admitted", 0)],
    ]


def test_an_engine_whose_role_says_that_it_hangs_costs_nobody_anything(tmp_path: Path) -> None:
    """Its HTTP process answers as ever: only its role sees that its scheduler is frozen. A publish does not ask it, and
    one that is under way lets go of it. When it goes on, it is given the weights that it lacks."""
    check, version = WeightCheck(version=4, probe=None, digests=()), [3]
    save(check, tmp_path)
    with EngineDouble(3) as hung, EngineDouble(3) as other:
        well, silent = Member(0, hung.url, 1), Member(0, hung.url, 1, silent="its process 7 is stopped")

        async def act(fleet: Fleet, membership: Membership) -> None:
            membership.announce(well)
            membership.announce(Member(1, other.url, 1))
            await until(lambda: [one.quarantined for one in fleet.state()] == [False, False])
            hung.token_s = 3600
            waiting = asyncio.gather(*(fleet.generate([1], 1, SAMPLING) for _ in range(2)))
            await until(lambda: fleet.state()[0].in_flight == 1)
            membership.announce(silent)
            assert {group[0].engine for group in await waiting} == {1}
            assert (fleet.state()[0].quarantined, fleet.state()[0].reason) == (True, "its process 7 is stopped")
            hung.calls.clear()
            await fleet.load(4, tmp_path, check)
            assert hung.calls == []
            assert other.version == "4"
            version[0] = 4
            membership.announce(well)
            await until(lambda: not fleet.state()[0].quarantined)
            assert hung.version == "4"
            hung.load_fault = "hang"
            hung.calls.clear()
            loading = asyncio.create_task(fleet.load(5, tmp_path, replace(check, version=5)))
            await until(lambda: "POST /update_weights_from_disk" in hung.calls)
            membership.announce(silent)
            assert (await loading)["engines_checked"] == 0.0
            assert (other.version, fleet.state()[0].quarantined) == ("5", True)

        monitored(tmp_path, act, published=lambda: version[0])


def test_an_engine_that_was_started_again_unannounced_is_given_weights(tmp_path: Path) -> None:
    with EngineDouble(3) as engine:

        async def act(fleet: Fleet, membership: Membership) -> None:
            membership.announce(Member(0, engine.url, started=1))
            await until(lambda: len(fleet.state()) == 1 and not fleet.state()[0].quarantined)
            engine.version = "unverified-0"
            await until(lambda: engine.version == "3")

        monitored(tmp_path, act)
    assert engine.loads == 1


def test_another_server_at_an_announced_address_stops_no_other_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EngineDouble(3) as good, EngineDouble(3) as usurped:

        async def act(fleet: Fleet, membership: Membership) -> None:
            membership.announce(Member(0, usurped.url))
            membership.announce(Member(1, good.url))
            await until(lambda: [one.quarantined for one in fleet.state()] == [False, False])
            usurped.api_key = "other"
            groups = await asyncio.gather(*(fleet.generate([1], 1, SAMPLING) for _ in range(4)))
            assert {group[0].engine for group in groups} == {1}
            await until(lambda: "another API key" in str(fleet.state()[0].reason))
            good.version = "unverified-0"
            await until(lambda: good.version == "3")
            await until(lambda: not fleet.state()[1].quarantined)
            await fleet.load(4, tmp_path, WeightCheck(version=4, probe=None, digests=()))
            assert [one.quarantined for one in fleet.state()] == [True, False]
            good.api_key = "other"
            monkeypatch.setattr(engine_pool, "REFUSED_S", 0.0)
            with pytest.raises(FatalError, match="another API key"):
                await fleet.load(5, tmp_path, WeightCheck(version=5, probe=None, digests=()))

        monitored(tmp_path, act)


def test_another_server_at_the_only_engine_s_address_is_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It died, and something else has its port until its next start announces itself. For a minute, that is."""
    with EngineDouble(3, api_key="other") as usurper, EngineDouble(3) as again:

        async def act(fleet: Fleet, membership: Membership) -> None:
            membership.announce(Member(0, usurper.url, 1))
            waiting = asyncio.create_task(fleet.generate([1], 1, SAMPLING))
            await until(lambda: "another API key" in str([one.reason for one in fleet.state()]))
            membership.announce(Member(0, again.url, 2))
            assert (await waiting)[0].versions.tolist() == [3, 3]
            membership.announce(Member(0, usurper.url, 3))
            await until(lambda: fleet.state()[0].url == usurper.url)
            monkeypatch.setattr(engine_pool, "REFUSED_S", 0.2)
            with pytest.raises(FatalError, match="another API key"):
                await fleet.generate([1], 1, SAMPLING)

        monitored(tmp_path, act)


def test_another_server_at_the_router_s_address_is_left_aside(tmp_path: Path) -> None:
    """The router was killed: its announcement is there, and so may be another server."""
    with EngineDouble(3) as engine, EngineDouble(3, api_key="other") as usurper:

        async def act(fleet: Fleet, membership: Membership) -> None:
            membership.announce_router(usurper.url)
            membership.announce(Member(0, engine.url))
            for _ in range(4):
                assert (await fleet.generate([1], 1, SAMPLING))[0].engine == 0
                fleet._pool.router_is_suspect = False
            assert not fleet.state()[0].quarantined

        monitored(tmp_path, act)


def test_a_publish_waits_for_the_next_start_of_the_only_engine(tmp_path: Path) -> None:
    check = WeightCheck(version=4, probe=None, digests=())
    with EngineDouble(3) as hung, EngineDouble(3) as again:

        async def act(fleet: Fleet, membership: Membership) -> None:
            membership.announce(Member(0, hung.url, 1))
            hung.load_fault = "hang"
            loading = asyncio.create_task(fleet.load(4, tmp_path, check))
            await until(lambda: "POST /update_weights_from_disk" in hung.calls)
            membership.announce(Member(0, hung.url, 1, silent="its process 7 is stopped"))
            await asyncio.sleep(1.5)
            assert not loading.done()
            membership.announce(Member(0, again.url, 2))
            assert (await loading)["engines_checked"] == 0.0
            assert again.version == "4"

        save(check, tmp_path)
        monitored(tmp_path, act, published=lambda: 4)


def test_the_monitor_goes_on_after_an_error_of_the_file_system_and_its_end_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    troubles: list[Exception] = [OSError(116, "Stale file handle")] * 3
    read = Updates.settled

    def settled(updates: Updates) -> tuple[int, int | None] | None:
        if troubles:
            raise troubles.pop()
        return read(updates)

    monkeypatch.setattr(Updates, "settled", settled)
    with EngineDouble(3) as engine:

        async def act(fleet: Fleet, membership: Membership) -> None:
            membership.announce(Member(0, engine.url))
            await fleet.generate([1], 1, SAMPLING)
            troubles.append(SupersededError("a later start has taken over"))
            await until(lambda: not troubles)
            await asyncio.sleep(0.2)
            with pytest.raises(SupersededError):
                await fleet.generate([1], 1, SAMPLING)

        monitored(tmp_path, act)


@pytest.mark.parametrize("judge", ["monitor", "resync"])
@pytest.mark.parametrize("acts", [("end",), ("begin",), ("begin", "end")], ids=" and ".join)
def test_a_publish_between_any_two_reads_of_a_look_quarantines_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, acts: tuple[str, ...], judge: str
) -> None:
    """The learner's publish of version 4 begins or ends before one read of the look: the first, the second, … Which
    version is published is written after that."""
    reads: list[Callable[[], None] | None] = []
    """What happens before each read of the look."""
    listed, info = Updates._listed, EngineClient.model_info

    def read() -> None:
        if reads and (act := reads.pop(0)) is not None:
            act()

    def listing(self: Updates) -> dict[str, set[int]]:
        read()
        return listed(self)

    async def model_info(self: EngineClient, deadline_s: float | None = None) -> ModelInfo:
        read()
        return await info(self, deadline_s)

    monkeypatch.setattr(Updates, "_listed", listing)
    monkeypatch.setattr(EngineClient, "model_info", model_info)

    async def looks(folder: Path, before: int, engine: EngineDouble) -> bool:
        """Look once. False where it has fewer than `before` reads."""
        fleet, changes = fleet_of(folder, [engine.url]), list[tuple[str, object]]()
        check = WeightCheck(version=3, probe=None, digests=())
        folder.mkdir()
        check.save(folder)
        await fleet.load(3, folder, check)
        learner = Updates(folder / "policy" / "updates")
        known = set(learner.folder.iterdir())
        async with learner.take("publish", 1.0) as update:
            update.given = 4
        record, released = sorted(set(learner.folder.iterdir()) - known)
        files = {path: path.read_bytes() for path in (record, released)}
        for path in files:
            path.unlink()

        def begin() -> None:
            record.write_bytes(files[record])
            engine.version = "unverified-4"

        def end() -> None:
            engine.version = "4"
            released.write_bytes(files[released])

        def act() -> None:
            for name in acts:
                dict(begin=begin, end=end)[name]()

        if acts == ("end",):
            begin()
        fleet._pool._on_change = lambda kind, **fields: changes.append((kind, fields.get("reason")))
        reads[:] = [*([None] * before), act]
        if judge == "resync":
            await fleet.resync(3, folder)
        else:
            await Monitor(fleet._pool, fleet._updates, fleet._resync_engines, lambda: 3).look()
        happened = not reads
        reads.clear()
        await fleet.close()
        assert changes == [], f"before read {before}"
        return happened

    with EngineDouble(0) as engine:
        before = 0
        while asyncio.run(looks(tmp_path / str(before), before, engine)):
            before += 1
    assert before >= 2, "the numbers and the engine"


def test_the_router_is_told_the_engines_again_after_it_lost_them(tmp_path: Path) -> None:
    with EngineDouble(3) as engine, RouterDouble([]) as router:

        async def act(fleet: Fleet, membership: Membership) -> None:
            membership.announce_router(router.url)
            membership.announce(Member(0, engine.url))
            await until(lambda: router.members == [engine.url])
            router.members = ["http://127.0.0.1:1"]
            await until(lambda: router.members == [engine.url])
            await fleet.generate([1], 1, SAMPLING)

        monitored(tmp_path, act)
