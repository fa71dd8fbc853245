"""Engines that give their memory to a learner on the same GPUs: what they hold when, and who wakes them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.batch import Sampling
from pipeline.errors import EngineUnavailableError, FatalError
from rollout_sglang.fleet import Fleet
from rollout_sglang.weights.weight_update import FleetUpdateSession
from tests.doubles.receiving_double import ReceivingDouble
from tests.doubles.sglang_double import MEMORY, RELEASES
from tests.support.fleets import members, settings

POLICY = Path("/policy/000013")


@pytest.fixture(params=RELEASES)
def engine(request: pytest.FixtureRequest) -> Iterator[ReceivingDouble]:
    with ReceivingDouble(12, sglang=request.param) as double:
        yield double


def learner(tmp_path: Path, engine: ReceivingDouble, act: Callable[[FleetUpdateSession], Awaitable[None]]) -> None:
    """What a learner does with an engine with which it takes turns."""

    async def main() -> None:
        own = settings(tmp_path, deadline_s=5, load_deadline_s=5)
        fleet = FleetUpdateSession(members(tmp_path, [engine.url]), **{**own, "colocated": True}, ranks_per_engine=1)
        try:
            await act(fleet)
        finally:
            await fleet.close()

    asyncio.run(main())


def collector(tmp_path: Path, engine: ReceivingDouble) -> Fleet:
    own = settings(tmp_path, deadline_s=1, load_deadline_s=5)
    return Fleet(members(tmp_path, [engine.url]), **{**own, "colocated": True})


def test_a_publish_wakes_an_engine_part_by_part(tmp_path: Path, engine: ReceivingDouble) -> None:
    """Keys and values come last: until then the learner needs room for what it sends."""

    async def act(fleet: FleetUpdateSession) -> None:
        for _ in range(2):  # a start of the learner cannot know what the last one had done
            await fleet.put_to_sleep()
        assert (engine.version, engine.memory, engine.paused) == ("asleep", set(), True)
        await fleet.begin_weight_update()
        assert engine.memory == {"weights", "cuda_graph"}
        await fleet.end_weight_update(13, POLICY, None, {})
        assert (engine.version, engine.memory, engine.paused) == ("13", {*MEMORY}, False)
        await fleet.generate([1], 1, Sampling(max_new_tokens=1))

    learner(tmp_path, engine, act)
    names = [call.rpartition("/")[2] for call in engine.calls]
    asleep = names.index("release_memory_occupation")
    assert names[asleep - 2 : asleep] == ["pause_generation", "update_weight_version"], "first it claims nothing"


def test_an_engine_whose_publish_failed_is_awake_and_claims_nothing(tmp_path: Path, engine: ReceivingDouble) -> None:
    async def act(fleet: FleetUpdateSession) -> None:
        await fleet.put_to_sleep()
        await fleet.begin_weight_update()
        await fleet.end_weight_update(13, POLICY, None, {0: "its buffer broke"})

    learner(tmp_path, engine, act)
    assert (engine.version, engine.memory) == ("unverified", {*MEMORY})


class DyingDouble(ReceivingDouble):
    """Dies, or only fails, when it is to give up its memory."""

    dies = True

    def route(self, method: str, path: str, request: Any) -> tuple[int, Any] | None:
        if path != "/release_memory_occupation":
            return super().route(method, path, request)
        if self.dies:
            stopping = threading.Thread(target=self.stop)
            stopping.start()
            stopping.join()
        return None


def test_an_engine_that_dies_while_it_falls_asleep_does_not_stop_its_learner(tmp_path: Path) -> None:
    """It has no memory any more. One that fails and lives keeps its memory, and the learner must not train."""
    with DyingDouble(12) as engine:
        learner(tmp_path, engine, lambda fleet: fleet.put_to_sleep())  # type: ignore[arg-type,return-value]
        assert engine.calls.count("POST /release_memory_occupation") == 1
        engine.start()
        engine.dies = False
        with pytest.raises(EngineUnavailableError, match="release_memory_occupation"):
            learner(tmp_path, engine, lambda fleet: fleet.put_to_sleep())  # type: ignore[arg-type,return-value]


def test_only_its_learner_wakes_an_engine(tmp_path: Path, engine: ReceivingDouble) -> None:
    """The learner trains: an engine that the collector woke would take the memory from under it."""
    learner(tmp_path, engine, lambda fleet: fleet.put_to_sleep())  # type: ignore[arg-type,return-value]
    before = list(engine.calls)

    async def collect() -> None:
        fleet = collector(tmp_path, engine)
        await fleet.resync(12, tmp_path / "000012")
        assert fleet.state()[0].reason == "it sleeps until the learner's next publish"
        with pytest.raises(EngineUnavailableError, match="it sleeps until the learner's next publish"):
            await fleet.generate([1], 1, Sampling(max_new_tokens=1))
        await fleet.close()

    asyncio.run(collect())
    assert {call for call in engine.calls[len(before) :]} == {"GET /model_info"}
    assert engine.memory == set()


def test_an_engine_that_its_learner_left_half_awake_is_woken_by_a_resync(
    tmp_path: Path, engine: ReceivingDouble
) -> None:
    """The learner was killed in its publish: its memory is free."""
    engine.version, engine.memory = "unverified", {"weights", "cuda_graph"}

    async def collect() -> None:
        fleet = collector(tmp_path, engine)
        await fleet.resync(12, tmp_path / "000012")
        assert len(await fleet.generate([1], 1, Sampling(max_new_tokens=1))) == 1
        await fleet.close()

    asyncio.run(collect())
    assert (engine.version, engine.memory) == ("12", {*MEMORY})


def test_an_engine_that_cannot_give_up_its_memory_is_refused(tmp_path: Path, engine: ReceivingDouble) -> None:
    engine.device = "cuda"

    async def act(fleet: FleetUpdateSession) -> None:
        with pytest.raises(FatalError, match="was started without --enable-memory-saver"):
            await fleet.put_to_sleep()
        await fleet.begin_weight_update()
        report = await fleet.end_weight_update(13, POLICY, None, {})
        assert "without --enable-memory-saver" in report.failures[0]
        engine.saves_memory = True

    learner(tmp_path, engine, act)
    assert "POST /release_memory_occupation" not in engine.calls
    learner(tmp_path, engine, lambda fleet: fleet.put_to_sleep())  # type: ignore[arg-type,return-value]
    assert engine.version == "asleep"
