"""Old and new servers: how each is paused, given weights and read, and that neither is taken for the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from pipeline.data.batch import Completion, Sampling
from pipeline.errors import EngineUnavailableError, EngineVersionError
from rollout_sglang.client import EngineClient
from rollout_sglang.protocol import Dialect, ServerInfo, dialect_of
from tests.doubles.receiving_double import ReceivingDouble
from tests.doubles.sglang_double import PARAMETER, RELEASES, EngineDouble, Release, checksum_of

T = TypeVar("T")
LONG = Sampling(max_new_tokens=40)


def ask(double: EngineDouble, act: Callable[[EngineClient], Awaitable[T]]) -> T:
    async def main() -> T:
        client = EngineClient(double.url, None, index=3, request_deadline_s=10, update=1)
        try:
            return await act(client)
        finally:
            await client.close()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("version", "pause", "sessions", "records_experts"),
    [
        ("0.5.9", "abort", False, False),
        ("0.5.17", "abort", False, False),
        ("0.5.18.post1", "abort", False, False),
        ("0.5.19", "retract", False, False),
        ("0.5.20", "retract", False, False),
        ("0.5.21", "retract", True, False),
        ("0.5.23", "retract", True, True),
        ("0.6.0rc1", "retract", True, True),
        ("0.0.0.dev0", "retract", True, True),
        ("a-branch", "retract", True, True),
    ],
)
def test_a_version_says_what_a_server_can(version: str, pause: str, sessions: bool, records_experts: bool) -> None:
    assert dialect_of(ServerInfo(version=version, quantization="fp8")) == Dialect(
        version=version,
        pause=pause,  # type: ignore[arg-type]
        sessions=sessions,
        records_experts=records_experts,
        quantizes=True,
        overlaps=True,
        stages=False,
        graphs=False,
        sleeps=False,
        no_tensors="" if sessions else dialect_of(ServerInfo(version=version, quantization="fp8")).no_tensors,
    )


def test_a_server_that_notes_each_step_at_once_says_so() -> None:
    assert not dialect_of(ServerInfo(version="0.5.23", disable_overlap_schedule=True)).overlaps


@pytest.mark.parametrize(("device", "asked"), [("cpu", True), ("cuda", False), (None, False)])
def test_only_a_server_on_a_cpu_is_asked_to_stage(tmp_path: Path, device: str | None, asked: bool) -> None:
    """A GPU server knows no such action: it prints a traceback, which would then be read as why it died."""
    with ReceivingDouble(4) as double:
        double.device, double.shows_checksums = device, True
        assert not ask(double, lambda client: client.stage_folder(tmp_path, deadline_s=5))
        assert not ask(double, lambda client: client.stage())
    assert ("POST /weights_checker" in double.calls) is asked


@pytest.mark.parametrize("release", RELEASES)
def test_a_server_is_asked_once_and_paused_as_it_can_be(release: Release) -> None:
    modes: list[str] = []

    async def pause_twice(client: EngineClient) -> None:
        await client.pause()
        await client.resume()
        await client.pause()

    with EngineDouble(sglang=release) as double:
        double.on_pause = modes.append
        ask(double, pause_twice)
    assert double.calls.count("GET /server_info") == 1
    assert modes == ["abort" if release == "0.5.17" else "retract"] * 2


@pytest.mark.parametrize("version", [None, "0.5.23" + "9" * 5000, "9" * 50 + "." + "9" * 5000 + ".1"])
def test_a_server_without_a_version_is_no_sglang(version: str | None) -> None:
    async def main(url: str) -> None:
        client = EngineClient(url, None, index=0, request_deadline_s=5)
        try:
            await client.dialect()
        finally:
            await client.close()

    with EngineDouble() as double:
        double.route = lambda *_: (200, {"server": "another"} | ({} if version is None else {"version": version}))  # type: ignore[method-assign]
        with pytest.raises(EngineUnavailableError, match="names no version of SGLang"):
            asyncio.run(main(double.url))


def sampled_over_an_update(double: EngineDouble) -> list[Completion]:
    async def act(client: EngineClient) -> list[Completion]:
        under_way = asyncio.create_task(client.generate([1], 2, LONG))
        await double.next_token()
        await client.pause()
        await client.update_from_disk(1, Path("/policy/1"), deadline_s=5)
        await client.name(1)
        await client.resume()
        return await under_way

    double.token_s = 0.05
    return ask(double, act)


def test_a_new_server_goes_on_and_says_which_token_is_whose() -> None:
    with EngineDouble(sglang="0.5.23") as double:
        samples = sampled_over_an_update(double)
    assert {sample.finish for sample in samples} == {"length"}
    assert all(set(sample.versions) == {0, 1} and len(sample.tokens) == 40 for sample in samples)


def test_an_old_server_answers_before_its_weights_change() -> None:
    """Were it paused by `retract`, the answer would be whole, and all of its tokens would count as version 1's."""
    with EngineDouble(sglang="0.5.17") as double:
        samples = sampled_over_an_update(double)
    assert {sample.finish for sample in samples} == {"abort"}
    assert all(set(sample.versions) == {0} and 0 < len(sample.tokens) < 40 for sample in samples)


def test_what_an_old_server_did_not_take_up_comes_back_empty() -> None:
    async def abort_while_it_waits(client: EngineClient) -> list[Completion]:
        await client.pause()
        waiting = asyncio.create_task(client.generate([1], 2, LONG))
        while not double.cache_keys:  # it has not come yet
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        await client.pause()
        await client.resume()
        return await waiting

    with EngineDouble(sglang="0.5.17") as double:
        samples = ask(double, abort_while_it_waits)
    assert [(len(sample.tokens), sample.finish, sample.engine) for sample in samples] == [(0, "abort", 3)] * 2
    assert samples[0].queued_s >= 0.2


def test_scoring_that_was_aborted_is_to_be_asked_again() -> None:
    with EngineDouble(sglang="0.5.17") as double:
        double.route = lambda *_: (499, {"error": {"message": "Request 0 was aborted"}})  # type: ignore[method-assign]
        with pytest.raises(EngineUnavailableError, match="ask again"):
            ask(double, lambda client: client.prompt_logprobs([[1, 2]]))


@pytest.mark.parametrize("release", RELEASES)
def test_checksums_of_both_shapes_are_read(release: Release) -> None:
    with EngineDouble(4, sglang=release) as double:
        double.shows_checksums = True
        held = ask(double, lambda client: client.checksums(deadline_s=5))
    assert held == [{PARAMETER: checksum_of(4)}]


@pytest.mark.parametrize("release", RELEASES)
def test_sessions_are_opened_and_closed_where_there_are_any(release: Release) -> None:
    async def give(receiver: EngineClient) -> None:
        await receiver.begin_update()
        await receiver.end_update(5, 5)
        await receiver.give_up_update()

    with ReceivingDouble(4, sglang=release) as double:
        ask(double, give)
    session_calls = [call for call in double.calls if call.endswith("_weight_update")]
    begin, end = "POST /begin_weight_update", "POST /end_weight_update"
    assert session_calls == ([] if release == "0.5.17" else [begin, end, end])
    assert double.version == "unverified-5"


def test_an_old_server_is_never_asked_about_a_group_by_updating_from_it() -> None:
    """It would end: SGLang asserts that it has the group, outside of what it catches."""
    with ReceivingDouble(4, sglang="0.5.17") as double:
        assert not ask(double, lambda client: client.is_member("group"))
    assert double.calls == ["GET /server_info", "POST /destroy_weights_update_group"]


def test_an_old_server_that_quantizes_is_sent_no_tensors() -> None:
    with ReceivingDouble(4, sglang="0.5.17") as double:
        double.quantization = "fp8"
        with pytest.raises(EngineVersionError, match=r"0\.5\.21 can; use weights\.channel disk"):
            ask(double, lambda client: client.begin_update())
    assert double.version == "4", "nothing was changed"
