"""The fleet under failures: quarantine, waiting, weight updates, resyncs, with and without a router."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from pipeline.data.checksums import list_checksums
from pipeline.data.membership import Member, Membership
from pipeline.errors import DeadlineExceededError, EngineUnavailableError, FatalError, StoreError
from pipeline.ports.engines import Sampling
from pipeline.ports.weights import Probe, WeightCheck
from rollout_sglang.fleet import ATTEMPTS, REFUSALS, Fleet
from rollout_sglang.protocol import UNKNOWN_ENGINE
from rollout_sglang.weights.update_lease import Updates
from tests.doubles.sglang_double import RELEASES, EngineDouble, RouterDouble
from tests.support.fleets import fleet_of, settings

T = TypeVar("T")
SAMPLING = Sampling(max_new_tokens=2)
LOADED = Path("/policy/000001")


@pytest.fixture(params=RELEASES)
def engines(request: pytest.FixtureRequest) -> Iterator[list[EngineDouble]]:
    with ExitStack() as stack:
        yield [stack.enter_context(EngineDouble(sglang=request.param)) for _ in range(2)]


@pytest.fixture
def router(engines: list[EngineDouble]) -> Iterator[RouterDouble]:
    with RouterDouble([engine.url for engine in engines]) as double:
        yield double


def with_fleet(
    folder: Path,
    engines: list[EngineDouble],
    act: Callable[[Fleet], Awaitable[T]],
    *,
    router: RouterDouble | None = None,
    deadline_s: float = 30.0,
    load_deadline_s: float = 20.0,
    keeps_kv: bool = False,
) -> T:
    async def main() -> T:
        fleet = fleet_of(
            folder,
            [engine.url for engine in engines],
            router=router.url if router else None,
            deadline_s=deadline_s,
            load_deadline_s=load_deadline_s,
            keeps_kv=keeps_kv,
        )
        try:
            return await act(fleet)
        finally:
            await fleet.close()

    return asyncio.run(main())


async def answering_engines(fleet: Fleet, requests: int = 4) -> set[int]:
    groups = await asyncio.gather(*(fleet.generate([1], 1, SAMPLING) for _ in range(requests)))
    return {group[0].engine for group in groups}


def test_requests_spread_over_the_least_busy_engines(tmp_path: Path, engines: list[EngineDouble]) -> None:
    for engine in engines:
        engine.token_s = 0.05
    assert with_fleet(tmp_path, engines, answering_engines) == {0, 1}
    assert [engine.calls.count("POST /generate") for engine in engines] == [2, 2]


@pytest.mark.parametrize("fault", ["400", "500", "garbage", "hang"])
def test_a_failing_engine_is_left_for_the_other(tmp_path: Path, engines: list[EngineDouble], fault: str) -> None:
    engines[0].generate_faults = [fault]  # type: ignore[list-item]

    async def act(fleet: Fleet) -> int:
        return (await fleet.generate([1], 1, SAMPLING))[0].engine

    deadline_s = 2.0 if fault == "hang" else 20.0
    assert with_fleet(tmp_path, engines, act, deadline_s=deadline_s) == 1


def test_an_engine_that_always_fails_ends_in_an_error(tmp_path: Path, engines: list[EngineDouble]) -> None:
    engines[0].generate_faults = ["500"] * 99
    with pytest.raises(EngineUnavailableError, match=f"{ATTEMPTS} engines in a row"):
        with_fleet(tmp_path, engines[:1], lambda fleet: fleet.generate([1], 1, SAMPLING))
    assert engines[0].calls.count("POST /generate") == ATTEMPTS


@pytest.mark.parametrize("prompt", [[], [-1, 2], [2, 12]])
def test_a_prompt_at_which_engines_end_reaches_none(
    tmp_path: Path, engines: list[EngineDouble], prompt: list[int]
) -> None:
    with pytest.raises(FatalError, match="an engine would end at it; correct the prompts of the task"):
        with_fleet(tmp_path, engines, lambda fleet: fleet.generate(prompt, 1, replace(SAMPLING, vocab_size=12)))
    assert "POST /generate" not in engines[0].calls + engines[1].calls


def test_an_engine_that_refuses_every_request_is_left_for_the_other(
    tmp_path: Path, engines: list[EngineDouble], router: RouterDouble
) -> None:
    engines[0].generate_faults = ["400"] * 99

    async def act(fleet: Fleet) -> tuple[list[int], list[bool]]:
        answered = [(await fleet.generate([1], 1, SAMPLING))[0].engine for _ in range(6)]
        return answered, [one.quarantined for one in fleet.state()]

    assert with_fleet(tmp_path / "direct", engines, act) == ([1] * 6, [True, False])
    answered, quarantined = with_fleet(tmp_path / "routed", engines, act, router=router)
    assert 0 not in answered
    assert quarantined[1] is False


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("routed", [False, True])
def test_a_request_that_every_engine_refuses_is_wrong_itself(
    tmp_path: Path, engines: list[EngineDouble], router: RouterDouble, count: int, routed: bool
) -> None:
    for engine in engines:
        engine.generate_faults = ["400"] * 99
    with pytest.raises(FatalError, match=r"refused one request, .* answered 400: .*too long.*rollout\.context_tokens"):
        with_fleet(
            tmp_path,
            engines[:count],
            lambda fleet: fleet.generate([1], 1, SAMPLING),
            router=router if routed else None,
        )
    asked = [engine.calls.count("POST /generate") for engine in engines]
    assert sum(asked) == REFUSALS + routed
    assert count == 1 or min(asked) > 0


def test_one_engine_s_refusals_are_no_proof_while_the_other_is_away(
    tmp_path: Path, engines: list[EngineDouble]
) -> None:
    engines[0].generate_faults = ["400"] * 99
    engines[1].stop()
    with pytest.raises(EngineUnavailableError, match=r"answered 400"):
        with_fleet(tmp_path, engines, lambda fleet: fleet.generate([1], 1, SAMPLING), deadline_s=5.0)


def test_a_second_engine_that_comes_back_last_is_proof_as_well(
    tmp_path: Path, engines: list[EngineDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    for engine in engines:
        engine.generate_faults = ["400"] * 99
    engines[1].stop()

    async def act(fleet: Fleet) -> None:
        refused = fleet._pool.answered_badly

        async def third_time(*arguments: Any) -> None:
            await refused(*arguments)
            if engines[0].calls.count("POST /generate") == REFUSALS and "POST /generate" not in engines[1].calls:
                engines[1].start()

        monkeypatch.setattr(fleet._pool, "answered_badly", third_time)
        await fleet.generate([1], 1, SAMPLING)

    with pytest.raises(FatalError, match=r"engines \[0, 0, 0, 1\] refused one request"):
        with_fleet(tmp_path, engines, act)


def test_a_refused_probe_of_an_engine_that_the_recipe_names_is_not_the_end(
    tmp_path: Path, engines: list[EngineDouble]
) -> None:
    engines[0].generate_faults = ["400"] * 99
    probe = Probe(rows=((1, 2, 3),), logprobs=((-0.375, -0.5),), max_mean_gap_nats=1.0)
    check = WeightCheck(version=1, probe=probe, digests=())

    async def act(fleet: Fleet) -> tuple[float, list[bool]]:
        seconds = await fleet.load(1, LOADED, check)
        return seconds["engines_checked"], [one.quarantined for one in fleet.state()]

    assert with_fleet(tmp_path, engines, act) == (0, [True, False])
    assert [engine.version for engine in engines] == ["unverified", "1"]


def test_a_dead_engine_is_waited_for(tmp_path: Path, engines: list[EngineDouble]) -> None:
    engine = engines[0]
    engine.stop()
    revival = threading.Timer(1.0, engine.start)
    revival.start()
    group = with_fleet(tmp_path, [engine], lambda fleet: fleet.generate([1], 1, SAMPLING))
    revival.join()
    assert group[0].engine == 0


def test_the_wait_for_a_dead_engine_ends(tmp_path: Path, engines: list[EngineDouble]) -> None:
    engines[0].stop()
    with pytest.raises(EngineUnavailableError, match="none of 1 engines came back within 1 s"):
        with_fleet(tmp_path, engines[:1], lambda fleet: fleet.generate([1], 1, SAMPLING), deadline_s=1.0)


def test_load_feeds_all_and_reports_the_slowest(tmp_path: Path, engines: list[EngineDouble]) -> None:
    async def act(fleet: Fleet) -> tuple[dict[str, float], dict[str, int | None]]:
        return await fleet.load(1, LOADED), await fleet.versions()

    seconds, versions = with_fleet(tmp_path, engines, act)
    assert seconds.keys() == {
        "prepare_s",
        "stage_s",
        "pause_s",
        "load_s",
        "checksum_s",
        "probe_s",
        "verify_s",
        "lock_s",
        "engines_checked",
    }
    assert seconds["engines_checked"] == 0
    assert versions == {engine.url: 1 for engine in engines}


@pytest.mark.parametrize("fault", ["refuse", "die", "wrong_version", "hang"])
def test_an_engine_that_fails_to_load_gets_no_requests(tmp_path: Path, engines: list[EngineDouble], fault: str) -> None:
    engines[0].load_fault = fault  # type: ignore[assignment]

    async def act(fleet: Fleet) -> set[int]:
        await fleet.load(1, LOADED)
        return await answering_engines(fleet)

    deadline_s = 2.0 if fault == "hang" else 20.0  # others need as long on a busy machine
    assert with_fleet(tmp_path, engines, act, load_deadline_s=deadline_s) == {1}
    assert "POST /generate" not in engines[0].calls


def test_load_fails_only_when_no_engine_is_left(tmp_path: Path, engines: list[EngineDouble]) -> None:
    for engine in engines:
        engine.load_fault = "refuse"
    with pytest.raises(EngineUnavailableError, match="no engine of 2 took version 1"):
        with_fleet(tmp_path, engines, lambda fleet: fleet.load(1, LOADED))


def test_a_wrong_key_ends_a_load_at_once(tmp_path: Path) -> None:
    with EngineDouble(api_key="other") as engine, pytest.raises(FatalError, match="API key"):
        with_fleet(tmp_path, [engine], lambda fleet: fleet.load(1, LOADED))


def test_heal_feeds_an_engine_that_came_back_with_old_weights(tmp_path: Path, engines: list[EngineDouble]) -> None:
    async def act(fleet: Fleet) -> set[int]:
        await fleet.load(1, LOADED)
        engines[0].version = "0"
        await fleet.resync(1, LOADED)
        return await answering_engines(fleet)

    for engine in engines:
        engine.token_s = 0.05
    assert with_fleet(tmp_path, engines, act) == {0, 1}
    assert (engines[0].version, engines[0].loads, engines[1].loads) == ("1", 2, 1)


def test_heal_leaves_healthy_engines_alone(tmp_path: Path, engines: list[EngineDouble]) -> None:
    async def act(fleet: Fleet) -> None:
        await fleet.load(1, LOADED)
        await fleet.resync(1, LOADED)

    with_fleet(tmp_path, engines, act)
    assert [engine.loads for engine in engines] == [1, 1]


@pytest.mark.parametrize("copied", ["the whole folder", "the weights alone"])
def test_no_engine_is_given_the_weights_of_an_older_version_under_a_newer_name(
    tmp_path: Path, engines: list[EngineDouble], copied: str
) -> None:
    """Without digests, as on GPUs, an engine could not tell: a step's weights differ by less than kernels do."""
    folders = [tmp_path / "policy" / f"{version:06}" for version in (5, 6)]
    for version, folder in enumerate(folders, start=5):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text(f"weights {version}")
        WeightCheck(version=version).save(folder)
        list_checksums(folder)
    names = ["model.safetensors"] if copied == "the weights alone" else [path.name for path in folders[0].iterdir()]
    for name in names:
        (folders[1] / name).write_bytes((folders[0] / name).read_bytes())
    with pytest.raises(StoreError, match=r"(holds version 5, expected 6|model.safetensors is damaged).*repair"):
        with_fleet(tmp_path, engines, lambda fleet: fleet.resync(6, folders[1]))
    assert [engine.loads for engine in engines] == [0, 0]


def test_given_engines_that_may_have_served_another_run_are_given_weights_once(
    tmp_path: Path, engines: list[EngineDouble]
) -> None:
    """They claim version 0, and so does every run. A check without digests, as on GPUs, cannot tell whose it is."""
    WeightCheck(version=0).save(tmp_path)
    list_checksums(tmp_path)

    async def act(fleet: Fleet) -> None:
        await fleet.resync(0, tmp_path)
        assert await answering_engines(fleet) == {0, 1}
        assert [engine.loads for engine in engines] == [1, 1]
        await fleet._pool.quarantine(fleet._pool[0], "it was silent")
        await fleet.resync(0, tmp_path)

    for engine in engines:
        engine.token_s = 0.05
        engine.version = "0"
    with_fleet(tmp_path, engines, act)
    assert [engine.loads for engine in engines] == [1, 1]


def test_an_engine_that_this_run_started_is_believed(tmp_path: Path, engines: list[EngineDouble]) -> None:
    engines[0].version = "0"
    membership = Membership(tmp_path / "engines")
    membership.announce(Member(0, engines[0].url, started=1))

    async def act() -> int:
        fleet = Fleet(membership, **settings(tmp_path))
        await fleet.resync(0, LOADED)
        completions = await fleet.generate([1], 1, SAMPLING)
        await fleet.close()
        return completions[0].engine

    assert asyncio.run(act()) == 0
    assert engines[0].loads == 0


def test_a_later_version_of_another_run_is_not_taken_for_this_run_s(
    tmp_path: Path, engines: list[EngineDouble]
) -> None:
    with_fleet(tmp_path, engines, lambda fleet: fleet.load(2, Path("/policy/000002")))
    engines[0].version = "9"

    async def act(fleet: Fleet) -> list[bool]:
        await fleet.resync(1, LOADED)
        return [engine.quarantined for engine in fleet.state()]

    assert with_fleet(tmp_path, engines, act) == [True, True]


def test_heal_never_takes_back_what_another_process_loaded(tmp_path: Path, engines: list[EngineDouble]) -> None:
    with_fleet(tmp_path, engines, lambda fleet: fleet.load(2, Path("/policy/000002")))
    with_fleet(tmp_path, engines, lambda fleet: fleet.resync(1, LOADED))
    assert [engine.version for engine in engines] == ["2", "2"]


def test_heal_takes_back_after_a_rollback(tmp_path: Path, engines: list[EngineDouble]) -> None:
    engines[0].version = "5"
    engines[0].load_fault = "refuse"
    with_fleet(tmp_path, engines, lambda fleet: fleet.load(1, LOADED))
    engines[0].load_fault = None
    with_fleet(tmp_path, engines, lambda fleet: fleet.resync(1, LOADED))
    assert engines[0].version == "1"


def test_an_answer_of_an_engine_restarted_unnoticed_is_thrown_away(tmp_path: Path, engines: list[EngineDouble]) -> None:
    async def act(fleet: Fleet) -> tuple[int, ...]:
        await fleet.load(1, LOADED)
        engines[0].version = "0"
        return tuple((await fleet.generate([1], 1, SAMPLING))[0].versions.tolist())

    assert with_fleet(tmp_path, engines[:1], act) == (1, 1)
    assert engines[0].loads == 2


def test_processes_that_give_weights_exclude_one_another(tmp_path: Path, engines: list[EngineDouble]) -> None:
    async def act(fleet: Fleet) -> None:
        async with Updates(tmp_path / "policy" / "updates").take("publish", 1.0):
            await fleet.load(1, LOADED)

    with pytest.raises(DeadlineExceededError, match="has given weights to engines for more than"):
        with_fleet(tmp_path, engines, act, load_deadline_s=0.3)
    assert engines[0].loads == 0


def test_the_router_answers_for_an_engine_it_does_not_name(
    tmp_path: Path, engines: list[EngineDouble], router: RouterDouble
) -> None:
    assert with_fleet(tmp_path, engines, answering_engines, router=router) == {UNKNOWN_ENGINE}
    assert all("POST /generate" in engine.calls for engine in engines)


def test_a_request_for_kept_sets_goes_past_the_router_which_would_not_pass_it_on(tmp_path: Path) -> None:
    with EngineDouble() as engine, RouterDouble([engine.url]) as router:
        ask = Sampling(max_new_tokens=2, top_p=0.8, kept_set=True)
        [sample] = with_fleet(tmp_path, [engine], lambda fleet: fleet.generate([1], 1, ask), router=router)
        assert sample.kept is not None
        assert (sample.engine, len(sample.kept)) == (0, 2)
        assert "POST /generate" not in router.calls


def test_requests_that_keep_their_cache_go_past_the_router_which_would_not_pass_their_key_on(tmp_path: Path) -> None:
    with EngineDouble() as engine, RouterDouble([engine.url]) as router:
        with_fleet(tmp_path, [engine], lambda fleet: fleet.generate([1], 1, SAMPLING), router=router, keeps_kv=True)
        assert "POST /generate" not in router.calls
        assert engine.cache_keys
        assert None not in engine.cache_keys


def test_the_router_forgets_a_dead_engine_until_it_is_resynced(
    tmp_path: Path, engines: list[EngineDouble], router: RouterDouble
) -> None:
    async def act(fleet: Fleet) -> tuple[list[str], list[str]]:
        await fleet.load(1, LOADED)
        engines[0].stop()
        await answering_engines(fleet)
        without = list(router.members)
        engines[0].version = "0"
        engines[0].start()
        await fleet.resync(1, LOADED)
        return without, list(router.members)

    without, resynced = with_fleet(tmp_path, engines, act, router=router)
    assert without == [engines[1].url]
    assert sorted(resynced) == sorted(engine.url for engine in engines)
    assert engines[0].version == "1"


def test_an_engine_that_failed_to_load_leaves_the_router(
    tmp_path: Path, engines: list[EngineDouble], router: RouterDouble
) -> None:
    engines[0].load_fault = "refuse"
    with_fleet(tmp_path, engines, lambda fleet: fleet.load(1, LOADED), router=router)
    assert router.members == [engines[1].url]


def test_heal_puts_back_what_another_process_took_out_of_the_router(
    tmp_path: Path, engines: list[EngineDouble], router: RouterDouble
) -> None:
    async def act(fleet: Fleet) -> None:
        await fleet.load(1, LOADED)
        router.members = [engines[1].url]
        await fleet.resync(1, LOADED)

    with_fleet(tmp_path, engines, act, router=router)
    assert sorted(router.members) == sorted(engine.url for engine in engines)
    assert engines[0].loads == 1


def test_a_router_that_is_restarted_is_waited_for(
    tmp_path: Path, engines: list[EngineDouble], router: RouterDouble
) -> None:
    router.stop()
    revival = threading.Timer(1.0, router.start)
    revival.start()
    group = with_fleet(tmp_path, engines, lambda fleet: fleet.generate([1], 1, SAMPLING), router=router)
    revival.join()
    assert len(group) == 1
