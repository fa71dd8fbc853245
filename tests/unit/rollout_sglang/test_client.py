"""The client against a server that misbehaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.config.sections import MOST_KEPT
from pipeline.data.batch import Completion, Sampling
from pipeline.data.routed_experts import ExpertShape
from pipeline.errors import EngineUnavailableError, EngineVersionError, FatalError, RecipeError
from pipeline.ports.weights import TensorSpec
from rollout_sglang.answers import input_logprobs, token_versions
from rollout_sglang.client import EngineClient, TeacherServers
from rollout_sglang.protocol import STAGE, MetaInfo, ServerInfo, dialect_of, policy_version
from rollout_sglang.transport import Transport
from tests.doubles.sglang_double import LARGEST_MASK, PARAMETER, EngineDouble, GenerateFault, checksum_of

T = TypeVar("T")
SAMPLING = Sampling(max_new_tokens=3)


@pytest.fixture
def engine() -> Iterator[EngineDouble]:
    with EngineDouble(version=4, api_key="key") as double:
        yield double


def client_of(engine: EngineDouble, *, deadline_s: float = 5.0, key: str = "key") -> EngineClient:
    return EngineClient(engine.url, key, index=7, request_deadline_s=deadline_s, update=1)


def run(client: EngineClient, call: Coroutine[Any, Any, T]) -> T:
    async def main() -> T:
        try:
            return await call
        finally:
            await client.close()

    return asyncio.run(main())


def test_a_group_is_one_request_and_comes_back_token_by_token(engine: EngineDouble) -> None:
    client = client_of(engine)
    group = run(client, client.generate([5, 6], 2, SAMPLING))
    assert engine.calls == ["POST /generate"]
    assert [sample.tokens.tolist() for sample in group] == [[0, 1, 2], [1, 2, 3]]
    assert group[0].logprobs.tolist() == [-1 / 8, -2 / 8, -3 / 8]
    assert group[0].versions.tolist() == [4, 4, 4]
    assert group[0].finish == "length"
    assert group[0].engine == 7
    assert 0 <= group[0].generated_s < 30
    assert 0 <= group[0].queued_s < 30


EXPERTS = ExpertShape(num_layers=2, moe_layers=(1,), num_experts=16, per_token=2)


def test_routed_experts_come_with_the_sample_when_asked_for(engine: EngineDouble) -> None:
    engine.experts = EXPERTS
    sampling = Sampling(max_new_tokens=3, experts=EXPERTS)
    with_routes, without = client_of(engine), client_of(engine)
    [sample] = run(with_routes, with_routes.generate([5, 6], 1, sampling))
    assert sample.experts is not None
    assert sample.experts.ids[:, 0].tolist() == [[5, 6], [7, 8], [2, 3], [4, 5], [0, 0]]
    assert sample.experts.known.tolist() == [True, True, True, True, False]
    [sample] = run(without, without.generate([5, 6], 1, SAMPLING))
    assert sample.experts is None


def test_routes_of_a_retracted_request_are_unknown(engine: EngineDouble) -> None:
    engine.experts, engine.retractions = EXPERTS, 1
    client = client_of(engine)
    [sample] = run(client, client.generate([5, 6], 1, Sampling(max_new_tokens=3, experts=EXPERTS)))
    assert sample.experts is not None
    assert not sample.experts.known.any()


def test_keys_and_values_are_kept_over_an_update_and_found_by_no_other_request(
    engine: EngineDouble, tmp_path: Path
) -> None:
    modes, engine.experts, engine.token_s = list[str](), EXPERTS, 0.05
    engine.on_pause = modes.append
    client = EngineClient(engine.url, "key", index=7, request_deadline_s=20, update=1, keeps_kv=True)

    async def update() -> list[Completion]:
        await client.generate([5, 6], 1, SAMPLING)
        asked = asyncio.create_task(client.generate([5, 6], 2, Sampling(max_new_tokens=40, experts=EXPERTS)))
        await engine.next_token()
        await client.pause()
        await client.update_from_disk(5, tmp_path, deadline_s=5)
        await client.name(5)
        await client.resume()
        return await asked

    group = run(client, update())
    assert modes == ["in_place"]
    assert len(set(engine.cache_keys)) == 2
    assert None not in engine.cache_keys
    for sample in group:
        assert set(sample.versions) == {4, 5}
        assert sample.experts is not None
        assert sample.experts.known[:-1].all(), "nothing was read again"


def test_routes_of_a_request_that_lost_its_keys_and_values_are_unknown(engine: EngineDouble) -> None:
    engine.experts, engine.retractions = EXPERTS, 1
    client = EngineClient(engine.url, "key", index=7, request_deadline_s=20, update=1, keeps_kv=True)
    [sample] = run(client, client.generate([5, 6], 1, Sampling(max_new_tokens=3, experts=EXPERTS)))
    assert sample.experts is not None
    assert not sample.experts.known.any()


@pytest.mark.parametrize("keeps_kv", [False, True])
def test_retractions_for_lack_of_memory_are_told_apart_from_those_of_an_update(
    engine: EngineDouble, tmp_path: Path, keeps_kv: bool
) -> None:
    engine.retractions, engine.token_s = 2, 0.05
    client = EngineClient(engine.url, "key", index=7, request_deadline_s=20, update=1, keeps_kv=keeps_kv)

    async def update() -> list[Completion]:
        asked = asyncio.create_task(client.generate([5, 6], 2, Sampling(max_new_tokens=40)))
        await engine.next_token()
        await client.pause()
        await client.update_from_disk(5, tmp_path, deadline_s=5)
        await client.name(5)
        await client.resume()
        return await asked

    group = run(client, update())
    assert {sample.distinct_versions for sample in group} == {(4, 5)}
    assert [sample.retractions for sample in group] == [2, 2]


KEPT = Sampling(max_new_tokens=3, top_p=0.8, kept_set=True)


def test_kept_sets_come_with_the_probabilities_over_them(engine: EngineDouble) -> None:
    client, again = client_of(engine), client_of(engine)
    _, sample = run(client, client.generate([5, 6], 2, KEPT))
    assert (sample.tokens.tolist(), sample.logprobs.tolist()) == ([1, 2, 3], [-2 / 16, -3 / 16, -4 / 16])
    assert sample.kept is not None
    assert sample.kept.offsets.tolist() == [0, 2, 4, 6]
    assert sample.kept.tokens.tolist() == [1, 2, 2, 3, 3, 4]
    [sample] = run(again, again.generate([5, 6], 1, SAMPLING))
    assert (sample.kept, sample.logprobs.tolist()) == (None, [-1 / 8, -2 / 8, -3 / 8])


def test_a_cut_by_top_p_alone_is_asked_for_within_what_an_engine_can_name(
    engine: EngineDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(engine, "_sample", lambda request: asked.append(request["sampling_params"]["top_k"]) or [])
    for top_k, kept_set in ((-1, True), (20, True), (-1, False)):
        client = client_of(engine)
        sampling = Sampling(max_new_tokens=3, top_p=0.8, top_k=top_k, kept_set=kept_set)
        with pytest.raises(EngineUnavailableError, match="answered 0 samples"):
            run(client, client.generate([5, 6], 1, sampling))
    assert asked == [MOST_KEPT, 20, -1]
    assert MOST_KEPT < LARGEST_MASK


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(output_token_sampling_mask=[[0], [1]]), "2 kept sets and 3 log-probabilities for 3 response tokens"),
        (dict(output_token_sampling_logprobs=[0.0]), "3 kept sets and 1 log-probabilities for 3 response tokens"),
        (dict(output_token_sampling_mask=[[0], [2], [2]]), "not in their own kept set, the first is response token 1"),
        (dict(output_token_sampling_mask=[[0], [1], [2, 2**31]]), "kept sets that cannot be"),
    ],
)
def test_kept_sets_that_do_not_fit_are_refused(
    engine: EngineDouble, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    answer_of = engine._answer_of

    def damaged(*arguments: Any) -> dict[str, Any]:
        answer = answer_of(*arguments)
        return answer | {"meta_info": answer["meta_info"] | changes}

    monkeypatch.setattr(engine, "_answer_of", damaged)
    client = client_of(engine)
    with pytest.raises(EngineUnavailableError, match=message):
        run(client, client.generate([5, 6], 1, KEPT))


def test_prefill_scores_leave_out_the_first_token(engine: EngineDouble) -> None:
    client = client_of(engine)
    scored = run(client, client.prompt_logprobs([[9, 1, 3], [2]]))
    np.testing.assert_array_equal(scored[0], np.array([-2 / 8, -4 / 8], np.float32))
    assert scored[1].shape == (0,)


def test_responses_are_scored_without_their_prompt(engine: EngineDouble) -> None:
    """The answer begins at the prompt's last token, whose own score nobody needs."""
    client = client_of(engine)
    scored = run(client, client.response_logprobs([9, 8, 7], [[1, 3], [2]]))
    assert [each.tolist() for each in scored] == [[-2 / 8, -4 / 8], [-3 / 8]]


def test_prefill_scores_at_another_temperature(engine: EngineDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang scores input at temperature 1 alone; the whole distribution says what it is at another."""
    logits, temperature = np.array([0.3, -1.2, 2.0]), 1.7
    logprobs = logits - np.logaddexp.reduce(logits)
    asked: list[dict[str, object]] = []

    def answer(_: object, request: dict[str, object]) -> list[dict[str, object]]:
        asked.append(request)
        tops = [None, *([[value, token, None] for token, value in enumerate(logprobs)] for _ in range(2))]
        scored = [[None, 1, None], [logprobs[2], 2, None], [logprobs[0], 0, None]]
        meta = {"finish_reason": {"type": "length"}, "weight_version": "4", "e2e_latency": 0.1}
        return [{"output_ids": [], "meta_info": meta | {"input_token_logprobs": scored, "input_top_logprobs": tops}}]

    monkeypatch.setattr(EngineDouble, "_sample", answer)

    def score(kept: list[list[NDArray[np.int32]]] | None = None) -> list[NDArray[np.float32]]:
        client = client_of(engine)
        return run(client, client.tempered_prompt_logprobs([[1, 2, 0]], temperature, 3, kept))

    tempered = logits / temperature - np.logaddexp.reduce(logits / temperature)
    np.testing.assert_allclose(score()[0], tempered[[2, 0]], rtol=1e-6)
    odds = np.exp(logits / temperature)
    kept = [[np.array([1, 2], np.int32), np.zeros(0, np.int32)]]
    np.testing.assert_allclose(score(kept)[0], [np.log(odds[2] / (odds[1] + odds[2])), tempered[0]], rtol=1e-6)
    assert asked[0]["top_logprobs_num"] == 3
    logprobs -= 0.1  # a server that leaves tokens out
    with pytest.raises(EngineUnavailableError, match="expected 1"):
        score()


def test_a_dropped_connection_is_tried_again(engine: EngineDouble) -> None:
    engine.generate_faults = ["drop", "drop"]
    client = client_of(engine)
    assert len(run(client, client.generate([5], 1, SAMPLING))) == 1
    assert engine.calls.count("POST /generate") == 3


@pytest.mark.parametrize(
    ("faults", "requests", "message"),
    [
        (["drop"] * 9, 3, "3 attempts"),
        (["500"] * 9, 1, "answered 500"),
        (["garbage"] * 9, 1, "protocol"),
        (["hang"] * 9, 1, "no answer within 0.3 s"),
    ],
)
def test_failures_are_bounded_and_named(
    engine: EngineDouble, faults: list[GenerateFault], requests: int, message: str
) -> None:
    engine.generate_faults = faults
    client = client_of(engine, deadline_s=0.3 if faults[0] == "hang" else 5.0)
    with pytest.raises(EngineUnavailableError, match=message):
        run(client, client.generate([5], 1, SAMPLING))
    assert engine.calls.count("POST /generate") == requests


def test_a_refused_connection_is_unavailable(engine: EngineDouble) -> None:
    engine.stop()
    client = client_of(engine)
    with pytest.raises(EngineUnavailableError, match="ConnectError"):
        run(client, client.model_info())


def test_a_wrong_key_is_fatal(engine: EngineDouble) -> None:
    client = client_of(engine, key="other")
    with pytest.raises(FatalError, match="another API key"):
        run(client, client.generate([5], 1, SAMPLING))


async def load(client: EngineClient, version: int, directory: Path, deadline_s: float = 5.0) -> None:
    await client.pause()
    try:
        await client.update_from_disk(version, directory, deadline_s=deadline_s)
        await client.name(version)
    finally:
        await client.resume()


def test_fed_weights_are_not_proved_until_they_are_named(engine: EngineDouble, tmp_path: Path) -> None:
    client = client_of(engine)

    async def act() -> None:
        await client.pause()
        await client.update_from_disk(5, tmp_path, deadline_s=5)
        await client.verify(5)
        assert (await client.model_info()).weight_version == "unverified-5"
        await client.resume()
        with pytest.raises(EngineVersionError, match="unverified-5"):
            await client.generate([5], 1, SAMPLING)
        await client.name(5)
        assert (await client.generate([5], 1, SAMPLING))[0].versions.tolist() == [5, 5, 5]

    run(client, act())
    assert (engine.version, engine.model_path, engine.paused) == ("5", str(tmp_path), False)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("refuse", EngineVersionError, "did not take version 5 .* Failed to get weights iterator"),
        ("hang", EngineUnavailableError, "no answer within 0.3 s"),
    ],
)
def test_a_failed_load_is_named(
    engine: EngineDouble, tmp_path: Path, fault: Any, error: type[Exception], message: str
) -> None:
    engine.load_fault = fault
    client = client_of(engine)
    with pytest.raises(error, match=message):
        run(client, load(client, 5, tmp_path, 0.3))


def test_a_disowned_engine_has_no_version_and_no_requests(engine: EngineDouble) -> None:
    engine.token_s = 0.05
    client = client_of(engine)

    async def act() -> str:
        sampling = asyncio.create_task(client.generate([5], 1, Sampling(max_new_tokens=40)))
        await engine.next_token()
        await client.invalidate()
        with pytest.raises(EngineVersionError, match="serves version unverified, expected 4"):
            await client.verify(4)
        return (await sampling)[0].finish

    assert run(client, act()) == "abort"


def test_checksums_are_those_of_the_server_or_none(engine: EngineDouble) -> None:
    client = client_of(engine)
    assert run(client, client.checksums(deadline_s=5)) is None
    engine.shows_checksums = True
    client = client_of(engine)
    assert run(client, client.checksums(deadline_s=5)) == [{PARAMETER: checksum_of(4)}]


def test_one_client_serves_one_event_loop_after_another(engine: EngineDouble) -> None:
    client = client_of(engine)
    assert [asyncio.run(client.model_info()).weight_version for _ in range(2)] == ["4", "4"]
    asyncio.run(client.close())


def test_tokens_carry_the_version_that_sampled_them(engine: EngineDouble, tmp_path: Path) -> None:
    engine.token_s = 0.05
    client = client_of(engine)

    async def load_midway() -> tuple[int, ...]:
        sampling = asyncio.create_task(client.generate([5], 1, Sampling(max_new_tokens=40)))
        await engine.next_token()
        await load(client, 5, tmp_path)
        return tuple((await sampling)[0].versions.tolist())

    versions = run(client, load_midway())
    assert sorted(versions) == list(versions)
    assert set(versions) == {4, 5}


def test_versions_without_spans_fall_back_to_the_request(engine: EngineDouble) -> None:
    engine.spans = False
    client = client_of(engine)
    assert run(client, client.generate([5], 1, SAMPLING))[0].versions.tolist() == [4, 4, 4]


def test_spans_that_do_not_cover_the_response_are_refused() -> None:
    meta = MetaInfo.model_validate(
        {
            "finish_reason": {"type": "stop"},
            "prompt_tokens": 1,
            "completion_tokens": 3,
            "weight_version": "2",
            "weight_versions": [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 3}],
            "e2e_latency": 0.5,
        }
    )
    assert token_versions(meta, 3).tolist() == [1, 2, 2]
    assert token_versions(meta, 3, late_tokens=1).tolist() == [1, 1, 2]
    assert token_versions(meta, 3, late_tokens=5).tolist() == [1, 1, 1]
    with pytest.raises(EngineUnavailableError, match="do not follow one another over 4 tokens"):
        token_versions(meta, 4)


def test_a_foreign_version_is_refused() -> None:
    with pytest.raises(EngineVersionError, match="'default'"):
        policy_version("default")


def test_scores_of_other_tokens_than_those_asked_for_are_refused() -> None:
    """SGLang names the last id of its vocabulary 0, so a 0 may stand for any token."""

    def answer(*named: int) -> Any:
        scored = [(None if place == 0 else -0.5, token, None) for place, token in enumerate(named)]
        return SimpleNamespace(meta_info=SimpleNamespace(input_token_logprobs=scored))

    for named in ((9, 1, 3), (9, 1, 0)):
        np.testing.assert_array_equal(input_logprobs([9, 1, 3], answer(*named)), np.full(2, -0.5, np.float32))
    for wrong in ((9, 2, 3), (9, 1)):
        with pytest.raises(EngineUnavailableError, match="others than asked"):
            input_logprobs([9, 1, 3], answer(*wrong))


@pytest.mark.parametrize(
    ("prompt", "said"),
    [([], "no tokens would end an engine"), ([5, -1], "token id -1, expected 0 to 99"), ([100], "token id 100, exp")],
)
def test_what_would_end_an_engine_is_not_sent(engine: EngineDouble, prompt: list[int], said: str) -> None:
    client = client_of(engine)
    calls = [client.generate(prompt, 2, Sampling(max_new_tokens=3, vocab_size=100))]
    if not prompt:
        calls += [client_of(engine).prompt_logprobs([[5], prompt]), client_of(engine).response_logprobs([], [prompt])]
    for call in calls:
        with pytest.raises(FatalError, match=said):
            run(client_of(engine), call)
    assert "POST /generate" not in engine.calls


TENSOR = TensorSpec(name="model.norm.weight", dtype="bfloat16", shape=(4,))
FOLDER = Path("/policy/000013")


class Server:
    """Answers orders in turn, by (status, states of its ranks)."""

    url = "http://engine"

    def __init__(self, *answers: tuple[int, Sequence[dict[str, str]]]) -> None:
        self._answers = list(answers)
        self.orders: list[dict[str, Any]] = []

    async def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        assert (method, path, options["repeatable"]) == ("POST", "/weights_checker", False)
        self.orders.append(json.loads(options["json"]["action"].removeprefix(STAGE)))
        status, states = self._answers.pop(0)
        ranks = [
            dict(checksums=state, per_gpu_checksum="", parallelism_info=dict(tp_rank=rank, tp_size=len(states)))
            for rank, state in enumerate(states)
        ]
        return httpx.Response(status, json=dict(success=status == 200, message="said so", ranks=ranks))


def ask(server: Server, act: Callable[[EngineClient], Coroutine[Any, Any, T]]) -> T:
    client = EngineClient(server.url, None, index=0, request_deadline_s=5.0)
    client._transport, client._staging = cast(Transport, server), True
    client._known_dialect = dialect_of(ServerInfo(version="0.5.23", device="cpu"))
    return asyncio.run(act(client))


def state(pending: int = 0, failure: str = "") -> dict[str, str]:
    return dict(pending=str(pending), failure=failure)


@pytest.mark.parametrize("status", [400, 404])
def test_a_server_that_cannot_stage_says_so(status: int) -> None:
    assert ask(Server((status, ())), lambda client: client.stage()) is False
    assert ask(Server((status, ())), lambda client: client.stage_folder(FOLDER, deadline_s=5.0)) is False


def test_a_folder_is_staged_when_the_slowest_rank_is_done() -> None:
    server = Server((200, [state(), state(1)]), (200, [state(), state(1)]), (200, [state(), state()]))
    assert ask(server, lambda client: client.stage_folder(FOLDER, deadline_s=5.0)) is True
    assert server.orders == [dict(do="folder", folder=str(FOLDER)), dict(do="wait"), dict(do="wait")]


def test_a_broadcast_is_waited_for() -> None:
    server = Server((200, [state(1)]), (200, [state(1)]), (200, [state()]))
    ask(server, lambda client: client.receive("group", [TENSOR], 5.0))
    assert server.orders[0] == dict(
        do="group", group="group", names=["model.norm.weight"], dtypes=["bfloat16"], shapes=[[4]]
    )
    assert not server._answers


def test_what_one_rank_cannot_stage_is_an_error() -> None:
    server = Server((200, [state(1), state(1)]), (200, [state(), state(0, "KeyError: no parameter")]))
    with pytest.raises(EngineVersionError, match="no parameter"):
        ask(server, lambda client: client.finish_stage(FOLDER, 5.0))


def test_a_server_that_was_started_again_is_found_out() -> None:
    """Another one may answer at its address, which knows no such order."""
    with pytest.raises(EngineVersionError, match="started again"):
        ask(Server((400, ())), lambda client: client.receive_shared(b"AAAA", 1, 5.0))


def test_waiting_has_a_deadline() -> None:
    server = Server(*[(200, [state(1)])] * 100)
    with pytest.raises(EngineUnavailableError, match=r"within 0\.1 s"):
        ask(server, lambda client: client.finish_stage(FOLDER, 0.1))


@pytest.mark.parametrize("strange", [dict(model="abc"), dict(pending="many", failure="")])
def test_an_answer_about_something_else_is_refused(strange: dict[str, str]) -> None:
    with pytest.raises(EngineUnavailableError, match="something else"):
        ask(Server((200, [strange])), lambda client: client.stage())


def test_membership_is_asked_without_an_update() -> None:
    assert ask(Server((200, [state() | dict(member="True")])), lambda client: client.is_member("group"))
    assert not ask(Server((200, [state() | dict(member="False")])), lambda client: client.is_member("group"))


@pytest.fixture
def pair() -> Iterator[tuple[EngineDouble, EngineDouble]]:
    with EngineDouble(api_key="key") as first, EngineDouble(api_key="key") as second:
        yield first, second


def servers_of(*doubles: EngineDouble) -> TeacherServers:
    return TeacherServers([double.url for double in doubles], "key", request_deadline_s=5.0)


def test_one_that_fails_is_followed_by_another(pair: tuple[EngineDouble, EngineDouble]) -> None:
    pair[0].generate_faults = ["500"]

    async def ask() -> list[list[float]]:
        servers = servers_of(*pair)
        try:
            with pytest.raises(EngineUnavailableError, match="the teacher did not score a group"):
                await servers.logprobs([5], [[1]])
            return [scored.tolist() for scored in await servers.logprobs([5], [[1], [2, 3]])]
        finally:
            await servers.close()

    assert asyncio.run(ask()) == [[-2 / 8], [-3 / 8, -4 / 8]]


def test_each_server_must_have_the_students_tokenizer(pair: tuple[EngineDouble, EngineDouble]) -> None:
    async def check() -> None:
        servers = servers_of(*pair)
        try:
            await servers.require_same_tokenizer({"12=": [49, 50, 61]})
        finally:
            await servers.close()

    asyncio.run(check())
    pair[1].shifted_ids = 1
    with pytest.raises(RecipeError, match=r"has another tokenizer than model\.path") as refused:
        asyncio.run(check())
    assert pair[1].url in str(refused.value)
