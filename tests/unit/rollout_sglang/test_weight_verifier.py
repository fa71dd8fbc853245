"""What engines hold is verified: by checksum, by probe, by one another; before they get any request."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.batch import Completion, Sampling
from pipeline.data.membership import Member, Membership
from pipeline.errors import EngineUnavailableError, EngineVersionError
from pipeline.ports.weights import ComingCheck, Probe, WeightCheck
from rollout_sglang.client import EngineClient
from rollout_sglang.fleet import Fleet, Target
from rollout_sglang.protocol import Dialect, ServerInfo, dialect_of
from rollout_sglang.weight_verifier import verify_checksums
from rollout_sglang.weights.update_lease import fresh_number
from tests.doubles.sglang_double import PARAMETER, RELEASES, Damage, EngineDouble, checksum_of
from tests.support import fleets

SAMPLING = Sampling(max_new_tokens=2)
ROWS = ((9, 1, 3), (7, 5))
PROBE = Probe(rows=ROWS, logprobs=((-2 / 8, -4 / 8), (-6 / 8,)), max_mean_gap_nats=0.1)
DIGESTS: tuple[dict[str, str], ...] = ({PARAMETER: checksum_of(1)},)
CHECK = WeightCheck(version=1, probe=PROBE, digests=DIGESTS)


@pytest.fixture(params=RELEASES)
def engines(request: pytest.FixtureRequest) -> Iterator[list[EngineDouble]]:
    with ExitStack() as stack:
        doubles = [stack.enter_context(EngineDouble(sglang=request.param)) for _ in range(2)]
        for double in doubles:
            double.shows_checksums = True
        yield doubles


@pytest.fixture
def fleet(tmp_path: Path, engines: list[EngineDouble]) -> Fleet:
    return fleet_of(tmp_path, engines)


def fleet_of(folder: Path, engines: list[EngineDouble]) -> Fleet:
    return fleets.fleet_of(folder, [engine.url for engine in engines], deadline_s=20, load_deadline_s=20)


async def answering(fleet: Fleet) -> set[int]:
    groups = await asyncio.gather(*(fleet.generate([1], 1, SAMPLING) for _ in range(4)))
    return {group[0].engine for group in groups}


def requests_of(engine: EngineDouble) -> list[str]:
    return [call.rpartition("/")[2] for call in engine.calls]


def test_weights_are_checked_before_the_engine_goes_on_and_answers_before_it_is_admitted(
    tmp_path: Path, fleet: Fleet, engines: list[EngineDouble]
) -> None:
    measured = asyncio.run(fleet.load(1, tmp_path, CHECK))
    assert requests_of(engines[0]) == [
        *("server_info", "pause_generation", "update_weights_from_disk"),
        *("model_info", "weights_checker", "update_weight_version", "continue_generation", "generate"),
    ]
    assert measured["probe_gap_nats"] == pytest.approx(0)
    assert "probe_kernels_nats" not in measured
    assert measured["engines_checked"] == 2
    assert [engine.version for engine in engines] == ["1", "1"]


def test_the_formats_are_taken_out_of_the_gap_where_they_are_emulated(
    tmp_path: Path, fleet: Fleet, engines: list[EngineDouble]
) -> None:
    emulated = replace(PROBE, logprobs=((-2.3 / 8, -4 / 8), (-6 / 8,)), quantized=((-2 / 8, -4.3 / 8), (-6 / 8,)))
    measured = asyncio.run(fleet.load(1, tmp_path, WeightCheck(version=1, probe=emulated, digests=DIGESTS)))
    assert measured["probe_gap_nats"] == pytest.approx(0.3 / 8 / 3)
    assert measured["probe_kernels_nats"] == pytest.approx(0.3 / 8 / 3)
    assert len(engines) == 2


def test_an_engine_is_judged_by_its_own_formats_where_they_are_emulated(
    tmp_path: Path, fleet: Fleet, engines: list[EngineDouble]
) -> None:
    """Formats that cost more than the bound are no fault; what else differs by more than the bound is one."""
    far = replace(PROBE, logprobs=((-4 / 8, -6 / 8), (-8 / 8,)), quantized=PROBE.logprobs)
    measured = asyncio.run(fleet.load(1, tmp_path, WeightCheck(version=1, probe=far, digests=DIGESTS)))
    assert measured["probe_gap_nats"] == pytest.approx(0.25)
    assert PROBE.max_mean_gap_nats < 0.25
    assert measured["probe_kernels_nats"] == pytest.approx(0)
    wrong = replace(PROBE, quantized=far.logprobs)
    with pytest.raises(EngineUnavailableError, match=r"0\.25 nats from the learner in the engine's formats"):
        asyncio.run(fleet.load(1, tmp_path, WeightCheck(version=1, probe=wrong, digests=DIGESTS)))


def test_an_engine_on_a_gpu_decodes_a_few_tokens_of_the_probe_before_it_is_admitted(
    tmp_path: Path, fleet: Fleet, engines: list[EngineDouble]
) -> None:
    for engine in engines:
        engine.device = "cuda"
    measured = asyncio.run(fleet.load(1, tmp_path, CHECK))
    assert measured["probe_decode_nats"] == pytest.approx(0)
    assert requests_of(engines[0]).count("generate") == 1 + 2 * len(ROWS), "one for all rows; then decode and prefill"


def test_an_engine_whose_graphs_read_other_weights_gets_no_requests(
    tmp_path: Path, fleet: Fleet, engines: list[EngineDouble]
) -> None:
    """Prefill and checksums show the new weights; decoding goes on with the old ones."""
    for engine in engines:
        engine.device, engine.stale_graphs_nats = "cuda", 0.5
    with pytest.raises(EngineUnavailableError, match=r"0\.\d+ nats in the mean from what it prefills .* CUDA graphs"):
        asyncio.run(fleet.load(1, tmp_path, CHECK))
    assert {engine.version for engine in engines} == {"unverified"}


def test_weights_that_moved_from_under_the_graphs_are_named(
    tmp_path: Path, fleet: Fleet, engines: list[EngineDouble]
) -> None:
    for engine in engines:
        engine.device, engine.moved = "cuda", ("model.norm.weight",)
    with pytest.raises(EngineUnavailableError, match=r"1 of version 1 lie elsewhere .* first model\.norm\.weight"):
        asyncio.run(fleet.load(1, tmp_path, CHECK))
    assert {engine.version for engine in engines} == {"unverified"}


def test_formats_are_asked_for_once_an_admission(
    tmp_path: Path, engines: list[EngineDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    async def formats(self: EngineClient, *, deadline_s: float, statistics: bool = False) -> None:
        asked.append(self.index)

    monkeypatch.setattr(EngineClient, "formats", formats)
    membership = Membership(tmp_path / "engines")
    (tmp_path / "engines").mkdir(exist_ok=True)
    for index, engine in enumerate(engines):
        membership.announce(Member(index, engine.url, 1))
    fleet = Fleet(membership, **fleets.settings(tmp_path, deadline_s=20, load_deadline_s=20))
    check = replace(CHECK, formats={})

    async def act() -> None:
        for _ in range(3):
            await fleet.load(1, tmp_path, check)
        assert sorted(asked) == [0, 1]
        membership.announce(Member(0, engines[0].url, 2))
        await fleet.load(1, tmp_path, check)
        assert sorted(asked) == [0, 0, 1], "another start of the engine"
        await fleet._pool.quarantine(fleet._pool[1], "a fault")
        await fleet.load(1, tmp_path, check)
        assert sorted(asked) == [0, 0, 1, 1], "it comes back"
        await fleet.close()

    asyncio.run(act())


@pytest.mark.parametrize("damage", ["weights", "answers"])
def test_an_engine_that_fails_once_is_fed_again(
    tmp_path: Path, fleet: Fleet, engines: list[EngineDouble], damage: Damage
) -> None:
    engines[0].damages = [damage]
    asyncio.run(fleet.load(1, tmp_path, CHECK))
    assert [engine.loads for engine in engines] == [2, 1]
    for engine in engines:
        engine.token_s = 0.05
    assert asyncio.run(answering(fleet)) == {0, 1}


@pytest.mark.parametrize("damage", ["weights", "answers"])
def test_an_engine_that_fails_twice_gets_no_request(
    tmp_path: Path, fleet: Fleet, engines: list[EngineDouble], damage: Damage
) -> None:
    engines[0].damages = [damage, damage]
    asyncio.run(fleet.load(1, tmp_path, CHECK))
    before = engines[0].calls.count("POST /generate")
    assert asyncio.run(answering(fleet)) == {1}
    assert engines[0].calls.count("POST /generate") == before
    assert (engines[0].loads, engines[0].version, engines[0].paused) == (2, "unverified", False)


def test_requests_under_way_are_aborted_when_the_proof_fails(
    tmp_path: Path, fleet: Fleet, engines: list[EngineDouble]
) -> None:
    engines[0].damages = ["weights", "weights"]
    for engine in engines:
        engine.token_s = 0.05

    async def act() -> list[Completion]:
        under_way = [asyncio.create_task(fleet.generate([1], 1, Sampling(max_new_tokens=40))) for _ in range(2)]
        await asyncio.sleep(0.2)
        await fleet.load(1, tmp_path, CHECK)
        return [(await task)[0] for task in under_way]

    answers = asyncio.run(act())
    assert all(answer.engine == 1 or answer.finish == "abort" for answer in answers)
    assert [engine.aborts for engine in engines] == [2, 0]


def test_another_process_refuses_the_answers_of_an_engine_that_failed(
    tmp_path: Path, fleet: Fleet, engines: list[EngineDouble]
) -> None:
    """The collector is not told which engines the learner quarantined: it sees it by the engine's version."""
    engines[0].damages = ["answers", "answers"]
    asyncio.run(fleet.load(1, tmp_path, CHECK))
    assert asyncio.run(answering(fleet_of(tmp_path, engines))) == {1}


def test_without_checksums_the_probe_decides(tmp_path: Path, fleet: Fleet, engines: list[EngineDouble]) -> None:
    for engine in engines:
        engine.shows_checksums = False
    engines[0].damages = ["answers", "answers"]
    measured = asyncio.run(fleet.load(1, tmp_path, CHECK))
    assert measured["engines_checked"] == 0
    assert asyncio.run(answering(fleet)) == {1}


def test_without_known_digests_engines_must_agree(tmp_path: Path, fleet: Fleet, engines: list[EngineDouble]) -> None:
    """Which of the two is right is not known; that both serve is ruled out."""
    engines[1].damages = ["weights", "weights"]
    asyncio.run(fleet.load(1, tmp_path, replace(CHECK, digests=())))
    assert sorted(engine.version for engine in engines) == ["1", "unverified"]


def test_versions_published_again_may_hold_other_weights(tmp_path: Path, engines: list[EngineDouble]) -> None:
    """Without digests, what an engine held at the first publish says nothing about the second."""
    one = fleet_of(tmp_path, engines[:1])
    first = replace(CHECK, digests=())
    asyncio.run(one.load(1, tmp_path, first))
    engines[0].damages = ["weights"]
    other = replace(PROBE, logprobs=((-2 / 8, -4 / 8), (-6.01 / 8,)))
    asyncio.run(one.load(1, tmp_path, replace(first, probe=other)))
    assert (engines[0].version, engines[0].loads) == ("1", 2)


def test_an_engine_of_another_size_is_named(tmp_path: Path, engines: list[EngineDouble]) -> None:
    with pytest.raises(EngineUnavailableError, match="has 1 tensor parallel ranks, the check of version 1 is for 2"):
        asyncio.run(fleet_of(tmp_path, engines).load(1, tmp_path, replace(CHECK, digests=DIGESTS * 2)))


def test_heal_believes_no_engine_that_only_claims_the_version(tmp_path: Path, engines: list[EngineDouble]) -> None:
    CHECK.save(tmp_path)
    engines[0].version, engines[0].damage = "1", "weights"
    engines[1].version = "1"
    fleet = fleet_of(tmp_path, engines)
    asyncio.run(fleet.resync(1, tmp_path))
    assert [engine.loads for engine in engines] == [1, 0]  # given once more, then it is right
    assert [engine.version for engine in engines] == ["1", "1"]
    engines[0].version, engines[0].damage, engines[0].damages = "1", "answers", ["answers"]
    again = fleet_of(tmp_path, engines)
    asyncio.run(again.resync(1, tmp_path))
    assert asyncio.run(answering(again)) == {1}


def test_resync_verifies_a_restarted_engine_from_the_folder_without_loading_it(
    tmp_path: Path, engines: list[EngineDouble]
) -> None:
    CHECK.save(tmp_path)
    for engine in engines:
        engine.version = "unverified-1"
    fleet = fleet_of(tmp_path, engines)
    asyncio.run(fleet.resync(1, tmp_path))
    assert [(engine.version, engine.loads) for engine in engines] == [("1", 0), ("1", 0)]
    asked = [len(engine.calls) for engine in engines]
    asyncio.run(fleet.resync(1, tmp_path))
    assert [len(engine.calls) - before for engine, before in zip(engines, asked, strict=True)] == [1, 1]


def test_a_restart_takes_the_proof_away(tmp_path: Path, engines: list[EngineDouble]) -> None:
    CHECK.save(tmp_path)
    fleet = fleet_of(tmp_path, engines)
    asyncio.run(fleet.load(1, tmp_path, CHECK))
    engines[0].version, engines[0].damage = "unverified-1", "weights"
    asyncio.run(fleet.resync(1, tmp_path))
    assert engines[0].loads == 2
    assert engines[0].version == "1"


def test_the_end_of_a_foreign_feed_is_proved_alike(tmp_path: Path, fleet: Fleet, engines: list[EngineDouble]) -> None:
    """What a channel that does not load folders calls once its tensors are there."""

    async def act() -> None:
        await fleet.versions()
        engine, target = fleet._pool[0], Target(1, tmp_path, CHECK)
        engine.client.take_part(fresh_number())
        await engine.client.pause()
        engines[0].version, engines[0].damage = "unverified-1", "weights"
        with pytest.raises(EngineVersionError, match=PARAMETER):
            await fleet._verify(engine, target.version, target.coming)
        assert (engines[0].version, engines[0].paused) == ("unverified", False)

    asyncio.run(act())


class Reports:
    """An engine that claims what it is asked for and reports some checksums."""

    index, url = 0, "http://engine"

    def __init__(self, held: dict[str, str]) -> None:
        self.held = held

    async def verify(self, version: int) -> None:
        pass

    async def dialect(self) -> Dialect:
        return dialect_of(ServerInfo(version="0.5.23", device="cpu"))

    async def checksums(self, *, deadline_s: float) -> list[dict[str, str]]:
        return [self.held]


def test_a_parameter_that_an_engine_does_not_report_is_wrong() -> None:
    engine: Any = Reports({"another": "f" * 16})
    with pytest.raises(EngineVersionError, match=f"first {re.escape(PARAMETER)} of rank 0: missing"):
        asyncio.run(verify_checksums(engine, 1, ComingCheck.known(1, CHECK), deadline_s=1.0))
    engine.held |= DIGESTS[0]
    assert asyncio.run(verify_checksums(engine, 1, ComingCheck.known(1, CHECK), deadline_s=1.0)) == [engine.held]
