"""Engines work out their answers while the learner still works out what they are compared with."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from pipeline.errors import EngineVersionError
from pipeline.ports.weights import ComingCheck, Probe, WeightCheck
from rollout_sglang.client import EngineClient
from rollout_sglang.weight_verifier import WeightVerifier
from rollout_sglang.weights.update_lease import fresh_number
from tests.doubles.sglang_double import PARAMETER, EngineDouble, checksum_of

ROWS = ((9, 1, 3), (7, 5))
PROBE = Probe(rows=ROWS, logprobs=((-2 / 8, -4 / 8), (-6 / 8,)), max_mean_gap_nats=0.1)
DIGESTS: tuple[dict[str, str], ...] = ({PARAMETER: checksum_of(1)},)
DEADLINE_S = 20.0


@pytest.fixture
def engine() -> Iterator[EngineDouble]:
    with EngineDouble() as double:
        double.shows_checksums = True
        double.version, double.paused = "unverified-1", True
        yield double


async def asked(engine: EngineDouble, route: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not any(call.endswith(route) for call in engine.calls):
            await asyncio.sleep(0.01)


def coming() -> ComingCheck:
    return ComingCheck(1, ROWS, None)


def verifying(engine: EngineDouble, check: ComingCheck) -> tuple[EngineClient, asyncio.Task[dict[str, float]]]:
    client = EngineClient(engine.url, None, index=0, request_deadline_s=DEADLINE_S, update=fresh_number())
    return client, asyncio.create_task(WeightVerifier(DEADLINE_S).verify(client, 1, check))


def test_an_engine_is_asked_before_the_learner_knows_and_named_afterwards(engine: EngineDouble) -> None:
    async def act() -> dict[str, float]:
        check = coming()
        client, task = verifying(engine, check)
        await asked(engine, "/weights_checker")
        assert (engine.version, engine.paused) == ("unverified-1", True), "nothing was compared yet"
        check.digests.set_result(DIGESTS)
        await asked(engine, "/generate")
        assert (engine.version, engine.paused) == ("1", False)
        assert not task.done(), "the probe was not compared yet"
        check.probe.set_result(PROBE)
        measured = await asyncio.wait_for(task, DEADLINE_S)
        await client.close()
        assert check.whole() == WeightCheck(version=1, probe=PROBE, digests=DIGESTS)
        return measured

    measured = asyncio.run(act())
    assert measured["probe_gap_nats"] == pytest.approx(0)
    assert measured["engines_checked"] == 1


@pytest.mark.parametrize("known", [(), DIGESTS])
def test_an_engine_fails_with_the_learner(engine: EngineDouble, known: tuple[dict[str, str], ...]) -> None:
    async def act() -> None:
        check = coming()
        if known:
            check.digests.set_result(known)
        client, task = verifying(engine, check)
        await asked(engine, "/generate" if known else "/weights_checker")
        check.fail("its disk is full")
        with pytest.raises(EngineVersionError, match=r"version 1 cannot be verified.*its disk is full"):
            await asyncio.wait_for(task, DEADLINE_S)
        await client.close()

    asyncio.run(act())
    assert (engine.version, engine.paused) == ("unverified", False)


def test_wrong_digests_are_found_though_they_come_late(engine: EngineDouble) -> None:
    async def act() -> None:
        check = coming()
        client, task = verifying(engine, check)
        await asked(engine, "/weights_checker")
        check.digests.set_result(({PARAMETER: checksum_of(2)},))
        with pytest.raises(EngineVersionError, match=PARAMETER):
            await asyncio.wait_for(task, DEADLINE_S)
        await client.close()

    asyncio.run(act())
    assert (engine.version, engine.paused) == ("unverified", False)
    assert not any(call.endswith("/generate") for call in engine.calls)
