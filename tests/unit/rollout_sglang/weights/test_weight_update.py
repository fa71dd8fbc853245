"""Beginning and ending a weight update: who may give weights, what engines claim meanwhile, who gets requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest

from pipeline.data.batch import Sampling
from pipeline.errors import DeadlineExceededError, EngineUnavailableError, RecipeError
from pipeline.ports.weights import WeightUpdateReport
from rollout_sglang.client import EngineClient
from rollout_sglang.fleet import Fleet
from rollout_sglang.weights.update_lease import Updates, fresh_number
from rollout_sglang.weights.weight_update import FleetUpdateSession
from tests.doubles.receiving_double import ReceivingDouble
from tests.doubles.sglang_double import RELEASES
from tests.support.fleets import fleet_of, members, settings

T = TypeVar("T")
POLICY = Path("/policy/000013")
SAMPLING = Sampling(max_new_tokens=1)


@pytest.fixture(params=RELEASES)
def engines(request: pytest.FixtureRequest) -> Iterator[list[ReceivingDouble]]:
    with ExitStack() as stack:
        yield [stack.enter_context(ReceivingDouble(12, sglang=request.param)) for _ in range(2)]


def with_fleet(
    tmp_path: Path,
    engines: list[ReceivingDouble],
    act: Callable[[FleetUpdateSession], Awaitable[T]],
    *,
    deadline_s: float = 5.0,
    nccl: str = "",
) -> T:
    async def main() -> T:
        fleet = FleetUpdateSession(
            members(tmp_path, [engine.url for engine in engines]),
            **settings(tmp_path, deadline_s=deadline_s, load_deadline_s=deadline_s),
            ranks_per_engine=1,
            nccl=nccl,
        )
        try:
            return await act(fleet)
        finally:
            await fleet.close()

    return asyncio.run(main())


def updates_of(tmp_path: Path) -> Updates:
    return Updates(tmp_path / "policy" / "updates")


def collector_fleet(tmp_path: Path, engines: list[ReceivingDouble]) -> Fleet:
    return fleet_of(tmp_path, [engine.url for engine in engines], deadline_s=2, load_deadline_s=0.3)


def test_while_a_publish_is_open_engines_wait_and_claim_nothing(tmp_path: Path, engines: list[ReceivingDouble]) -> None:
    async def act(fleet: FleetUpdateSession) -> WeightUpdateReport:
        report = await fleet.begin_weight_update()
        assert fleet.is_open
        assert all(engine.paused and engine.session == engine.has_sessions for engine in engines)
        assert set((await fleet.versions()).values()) == {None}
        with pytest.raises(DeadlineExceededError):
            async with updates_of(tmp_path).take("resync", 0.1):
                pass
        return report

    report = with_fleet(tmp_path, engines, act)
    assert report.failures == {}
    assert report.measured.keys() == {"lock_s", "pause_s"}


def test_fed_engines_serve_the_version_and_the_others_get_no_requests(
    tmp_path: Path, engines: list[ReceivingDouble]
) -> None:
    async def act(fleet: FleetUpdateSession) -> WeightUpdateReport:
        await fleet.begin_weight_update()
        report = await fleet.end_weight_update(13, POLICY, None, {1: "its broadcast broke"})
        groups = await asyncio.gather(*(fleet.generate([1], 1, SAMPLING) for _ in range(4)))
        assert {group[0].engine for group in groups} == {0}
        assert list((await fleet.versions()).values()) == [13, None]
        async with updates_of(tmp_path).take("resync", 0.1) as update:
            assert update.given == 13
        return report

    report = with_fleet(tmp_path, engines, act)
    assert report.failures == {1: "its broadcast broke"}
    assert report.measured.keys() >= {"load_s", "checksum_s", "probe_s"}
    assert not any(engine.paused or engine.session for engine in engines)
    assert engines[1].aborts == 1, "requests under way are asked elsewhere"
    assert "POST /generate" not in engines[1].calls


def test_an_engine_of_another_nccl_is_left_out_with_both_releases(
    tmp_path: Path, engines: list[ReceivingDouble]
) -> None:
    """NCCL would refuse the group: by an error without a release, a minute later, with the engine paused."""
    for engine, engine.nccl in zip(engines, ("2.28.9", "2.30.7"), strict=True):
        engine.shows_checksums = True

    async def act(fleet: FleetUpdateSession) -> WeightUpdateReport:
        return await fleet.begin_weight_update()

    report = with_fleet(tmp_path, engines, act, nccl="2.28.9")
    assert report.failures.keys() == {1}
    assert "NCCL 2.30.7 in the engines' torch and 2.28.9 in the learner's" in report.failures[1]
    assert (engines[0].paused, engines[1].paused) == (True, False)


def test_a_learner_of_another_nccl_than_all_engines_ends(tmp_path: Path, engines: list[ReceivingDouble]) -> None:
    for engine in engines:
        engine.shows_checksums, engine.nccl = True, "2.30.7"

    async def act(fleet: FleetUpdateSession) -> None:
        with pytest.raises(RecipeError, match=r"NCCL 2\.30\.7 in the engines' torch and 2\.28\.9 in the learner's"):
            await fleet.begin_weight_update()
        assert not fleet.is_open

    with_fleet(tmp_path, engines, act, nccl="2.28.9")
    assert not any(engine.paused for engine in engines)


def test_an_engine_that_cannot_be_reached_is_reported(tmp_path: Path, engines: list[ReceivingDouble]) -> None:
    engines[0].stop()

    async def act(fleet: FleetUpdateSession) -> tuple[WeightUpdateReport, WeightUpdateReport]:
        opened = await fleet.begin_weight_update()
        return opened, await fleet.end_weight_update(13, POLICY, None, opened.failures)

    opened, closed = with_fleet(tmp_path, engines, act)
    assert opened.failures.keys() == closed.failures.keys() == {0}
    assert engines[1].version == "13"


@pytest.mark.parametrize("engines", ["0.5.23"], indirect=True)
def test_a_session_that_a_dead_sender_left_open_is_closed(tmp_path: Path, engines: list[ReceivingDouble]) -> None:
    async def open_only(fleet: FleetUpdateSession) -> WeightUpdateReport:
        return await fleet.begin_weight_update()

    with_fleet(tmp_path, engines, open_only)
    assert all(engine.session for engine in engines)
    assert with_fleet(tmp_path, engines, open_only).failures == {}
    assert engines[0].calls.count("POST /end_weight_update") == 1


def test_after_a_dead_sender_the_collector_feeds_the_published_version(
    tmp_path: Path, engines: list[ReceivingDouble]
) -> None:
    async def open_only(fleet: FleetUpdateSession) -> None:
        await fleet.begin_weight_update()

    with_fleet(tmp_path, engines, open_only)

    async def resync() -> list[int | None]:
        fleet = collector_fleet(tmp_path, engines)
        try:
            await fleet.resync(12, POLICY)
            return list((await fleet.versions()).values())
        finally:
            await fleet.close()

    assert asyncio.run(resync()) == [12, 12]
    assert not any(engine.paused for engine in engines)


def test_a_folder_that_is_not_there_yet_leaves_the_engine_out(tmp_path: Path, engines: list[ReceivingDouble]) -> None:
    """Version 13 is served by engine 0 and not written yet; engine 1 was started again, from the folder before."""

    async def publish(fleet: FleetUpdateSession) -> None:
        await fleet.begin_weight_update()
        await fleet.end_weight_update(13, POLICY, None, {})

    with_fleet(tmp_path, engines, publish)
    engines[1].restart()
    engines[1].load_fault = "refuse"

    async def resync() -> set[int]:
        fleet = collector_fleet(tmp_path, engines)
        try:
            await fleet.resync(13, tmp_path / "missing")
            return {(await fleet.generate([1], 1, SAMPLING))[0].engine for _ in range(3)}
        finally:
            await fleet.close()

    assert asyncio.run(resync()) == {0}


def test_a_dropped_update_is_not_asked_again(engines: list[ReceivingDouble]) -> None:
    """The engine may have taken part in the broadcast; a second call would wait for another one."""

    async def receive() -> None:
        receiver = EngineClient(engines[0].url, None, index=0, request_deadline_s=5, update=fresh_number())
        try:
            await receiver.receive("group", (), 5)
        finally:
            await receiver.close()

    engines[0].session, engines[0].groups["group"] = True, None
    engines[0].route = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(EngineUnavailableError, match="1 attempts"):
        asyncio.run(receive())
    assert engines[0].calls == ["POST /update_weights_from_distributed"]
