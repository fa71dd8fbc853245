"""The fleet under failures: quarantine, waiting, weight updates, resyncs, with and without a router."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import pytest

from pipeline.data.batch import Sampling
from pipeline.data.checksums import list_checksums
from pipeline.data.membership import Member, Membership
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import DeadlineExceededError, EngineUnavailableError, FatalError, StoreError, SupersededError
from pipeline.ports.weights import WeightCheck
from rollout_sglang import engine_pool, transport
from rollout_sglang import fleet as fleet_module
from rollout_sglang.client import EngineClient
from rollout_sglang.fleet import ATTEMPTS, REFUSALS, Fleet, Monitor
from rollout_sglang.protocol import UNKNOWN_ENGINE, ModelInfo
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


def test_heal_never_takes_back_what_another_process_loaded(tmp_path: Path, engines: list[EngineDouble]) -> None:
    with_fleet(tmp_path, engines, lambda fleet: fleet.load(2, Path("/policy/000002")))
    with_fleet(tmp_path, engines, lambda fleet: fleet.resync(1, LOADED))
    assert [engine.version for engine in engines] == ["2", "2"]


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


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "PERIOD_S", 0.05)


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
    monkeypatch.setattr(fleet_module, "SILENCE_S", 2.0)
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
