"""Real SGLang servers, shared by a session: what they answer, how they take weights, how they end.

The servers are those of EVENKEEL_ROLLOUT_PYTHON, where it is set: so other releases of SGLang are tried.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from pipeline.config.sections import RolloutPrecision
from pipeline.data.batch import Sampling
from pipeline.errors import EngineVersionError, FatalError
from pipeline.ports.load import EngineLoad
from pipeline.ports.weights import WeightCheck
from rollout_sglang.client import EngineClient
from rollout_sglang.engine_pool import RouterClient
from rollout_sglang.server.rollout_python import require_sglang
from rollout_sglang.server.start import free_port, free_ports, start_router
from rollout_sglang.server.update_fence import UPDATE_HEADER
from rollout_sglang.weight_verifier import verify_decoding
from rollout_sglang.weights.update_lease import fresh_number
from tests.doubles.sglang_double import EngineDouble, Release
from tests.doubles.tiny_model import reference_logprobs, reference_model
from tests.support.engines import KEY, ROWS, TinyEngine, TinyEngines, load, under_way
from tests.support.fleets import fleet_of
from tests.support.listening import beyond_loopback, listening
from tests.support.promql import expressions, selectors, shown
from tests.support.recorded_answers import ask_all, recorded

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

RELEASE: Release = "0.5.17" if require_sglang() == "0.5.17" else "0.5.23"
"""Of the double that should answer alike."""


@pytest.fixture(scope="module")
def engines(tiny_engines: TinyEngines) -> dict[RolloutPrecision, TinyEngine]:
    return tiny_engines.lease(["fp32", "fp8_tensor", "fp8_block"])


@pytest.fixture
def engine(engines: dict[RolloutPrecision, TinyEngine]) -> TinyEngine:
    return engines["fp32"]


def largest_difference(ours: list[NDArray[np.float32]], theirs: list[NDArray[np.float32]]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


def test_an_engine_listens_at_its_own_address_alone(engines: dict[RolloutPrecision, TinyEngine]) -> None:
    """Also the store at which its ranks meet, and which asks for no key."""
    for engine in engines.values():
        found = listening([psutil.Process(engine.process.pid)])
        assert ("127.0.0.1", engine.spec.port) in found
        assert beyond_loopback([psutil.Process(engine.process.pid)]) == set(), found


def test_what_an_engine_decodes_is_what_it_prefills(engines: dict[RolloutPrecision, TinyEngine]) -> None:
    """As on a GPU after every publish, where decoding replays CUDA graphs; and no weight of theirs has moved."""
    for precision, engine in engines.items():
        assert engine.ask(lambda client: verify_decoding(client, ROWS, 1e-3)) < 1e-4, precision
        assert engine.ask(lambda client: client.moved_weights(deadline_s=30)) == []
        assert engine.ask(lambda client: client.checksums("nccl", deadline_s=30)) == [{"nccl": ""}], "torch for CPUs"


def test_an_engine_takes_inputs_as_long_as_its_context(engine: TinyEngine) -> None:
    """Here as long as the model has positions."""
    row = [place % 256 for place in range(engine.spec.context_tokens)]
    [scored] = engine.ask(lambda client: client.prompt_logprobs([row]))
    assert len(scored) == engine.spec.context_tokens - 1


def test_a_turn_finds_all_of_the_one_before_it_but_the_token_that_ended_it(engine: TinyEngine) -> None:
    prompt = [*ROWS[1], 11, 7]

    async def turns(client: EngineClient) -> tuple[list[int], int]:
        [first] = await client.generate(prompt, 1, Sampling(max_new_tokens=20))
        context = [*prompt, *first.tokens.tolist()]
        [second] = await client.generate([*context, 5, 6], 1, Sampling(max_new_tokens=4))
        return context, second.cached_tokens

    context, cached = engine.ask(turns)
    assert cached in (len(context) - 1, len(context))  # an engine may have read the last token already


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_are_those_of_transformers(engine: TinyEngine, temperature: float) -> None:
    engine.load(0)
    sampling = Sampling(max_new_tokens=16, temperature=temperature, top_p=0.9)
    group = engine.ask(lambda client: client.generate(ROWS[0], 4, sampling))
    model = reference_model(engine.full_precision[0])
    for sample in group:
        theirs = reference_logprobs(model, [*ROWS[0], *sample.tokens.tolist()], temperature)[len(ROWS[0]) - 1 :]
        np.testing.assert_allclose(sample.logprobs, theirs, atol=1e-4)
        assert sample.versions.tolist() == [0] * len(sample.tokens)
        assert sample.generated_s > 0
    assert len({tuple(sample.tokens) for sample in group}) > 1


def test_new_weights_are_those_that_answer(engine: TinyEngine) -> None:
    for version in (0, 1, 0):
        engine.load(version)
        assert engine.ask(lambda client: client.model_info()).weight_version == str(version)
        scored = engine.scores()
        assert largest_difference(scored, engine.expected(version)) < 1e-4
        assert largest_difference(scored, engine.expected(1 - version)) > 0.1


@pytest.mark.parametrize("precision", ["fp8_tensor", "fp8_block"])
def test_emulated_fp8_is_the_arithmetic_of_the_formats(
    engines: dict[RolloutPrecision, TinyEngine], precision: RolloutPrecision
) -> None:
    engine = engines[precision]
    for version in (0, 1):
        engine.load(version)
        scored = engine.scores()
        quantized = engine.expected(version)
        full = [reference_logprobs(reference_model(engine.full_precision[version]), row) for row in ROWS]
        # An activation on the border between two e4m3 values may fall either way, which moves the tokens after it.
        differences = np.concatenate([np.abs(a - b) for a, b in zip(scored, quantized, strict=True)])
        from_full = np.concatenate([np.abs(a - b) for a, b in zip(scored, full, strict=True)])
        assert np.quantile(differences, 0.9) < 1e-4
        assert np.median(from_full) > 1e-3


def test_a_request_under_way_goes_on_with_new_weights(engine: TinyEngine) -> None:
    engine.load(0)

    async def load_midway(client: EngineClient) -> Any:
        sampling = await under_way(client.generate(ROWS[0], 8, Sampling(max_new_tokens=400)), engine.spec.log)
        await load(client, 1, engine.checkpoints[1])
        return await sampling

    group = engine.ask(load_midway)
    if RELEASE == "0.5.17":
        assert {sample.finish for sample in group} == {"abort"}
        assert {version for sample in group for version in sample.versions} == {0}
        return
    switched = [sample for sample in group if set(sample.versions) == {0, 1}]
    assert switched
    models = [reference_model(folder) for folder in engine.full_precision]
    sample = switched[0]
    theirs = [reference_logprobs(model, [*ROWS[0], *sample.tokens.tolist()])[len(ROWS[0]) - 1 :] for model in models]
    assert list(sample.versions) == sorted(sample.versions)
    expected = np.where(sample.versions == 0, theirs[0], theirs[1])
    np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


def test_an_engine_tells_what_its_requests_hold_and_no_retraction_by_an_update(engine: TinyEngine) -> None:
    engine.load(0)

    async def loads(client: EngineClient) -> tuple[EngineLoad, Any]:
        asked = await under_way(client.generate(ROWS[0], 8, Sampling(max_new_tokens=400)), engine.spec.log)
        held = await client.load(30.0)
        await load(client, 1, engine.checkpoints[1])
        group = await asked
        async with asyncio.timeout(60):
            while (await client.load(30.0)).running:
                await asyncio.sleep(0.05)
        return held, group

    held, group = engine.ask(loads)
    assert 1 <= held.running <= 8
    assert len(ROWS[0]) < held.live_tokens < held.kv_tokens
    assert held.kv_use == pytest.approx(held.live_tokens / held.kv_tokens, abs=1e-4)
    assert [sample.retractions for sample in group] == [0] * 8


def test_a_folder_that_is_not_there_changes_nothing(engine: TinyEngine, tmp_path: Path) -> None:
    engine.load(0)
    with pytest.raises(EngineVersionError, match="did not take version 9"):
        engine.ask(lambda client: load(client, 9, tmp_path / "missing"))
    assert engine.ask(lambda client: client.model_info()).weight_version == "0"
    assert largest_difference(engine.scores(), engine.expected(0)) < 1e-4


def test_nothing_is_open_without_the_key(engine: TinyEngine) -> None:
    for path in ("/generate", "/update_weights_from_disk", "/pause_generation", "/continue_generation"):
        assert httpx.post(f"{engine.spec.url}{path}", json={}, trust_env=False).status_code == 401
    with pytest.raises(FatalError, match="another API key"):
        engine.ask(lambda client: client.model_info(), key="guess")
    assert KEY not in " ".join(psutil.Process(engine.process.pid).cmdline())
    assert KEY not in engine.spec.log.read_text()


def test_a_prompt_that_is_too_long_is_fatal(engine: TinyEngine) -> None:
    with pytest.raises(FatalError, match=r"rollout\.context_tokens"):
        engine.ask(lambda client: client.generate([1] * 600, 1, Sampling(max_new_tokens=1)))


def test_names_of_the_dashboard_and_the_alerts_appear(engine: TinyEngine) -> None:
    engine.ask(lambda client: client.generate([1, 2, 3], 1, Sampling(max_new_tokens=4)))
    answer = httpx.get(f"{engine.spec.url}/metrics")  # without a key: these are numbers, and Prometheus has none
    read = {one.name for text in expressions().values() for one in selectors(text) if one.name.startswith("sglang:")}
    assert len(read) >= 5
    assert read <= shown(answer.text).keys()
    assert KEY not in answer.text


def kinds_of(value: Any) -> Any:
    """The JSON kinds of an answer. Of a list of objects, those of the first; of a list of rows, those that any row has;
    of any other list, those of all elements, or the one that all have."""
    if isinstance(value, dict):
        return {name: kinds_of(item) for name, item in value.items()}
    if not isinstance(value, list):
        return "null" if value is None else type(value).__name__
    if value and isinstance(value[0], dict):
        return [kinds_of(value[0])]
    found = [kinds_of(item) for item in value]
    if value and isinstance(value[0], list):
        return tuple(sorted(set(found)))
    return tuple(found) if len(set(found)) > 1 else tuple(found[:1])


def assert_part_of(double: Any, real: Any, where: str) -> None:
    if isinstance(double, dict):
        assert double.keys() <= real.keys(), where
        for name, item in double.items():
            assert_part_of(item, real[name], f"{where}.{name}")
    elif isinstance(double, list) and double and isinstance(double[0], dict):
        assert_part_of(double[0], real[0], f"{where}[0]")
    else:
        assert double == real, where


def test_the_double_answers_like_the_server(engine: TinyEngine) -> None:
    engine.load(0)
    generate = {
        "input_ids": [ROWS[0]],
        "sampling_params": {"n": 2, "max_new_tokens": 3, "temperature": 1.0},
        "return_logprob": True,
    }
    score = {
        "input_ids": ROWS[:2],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    update = {"model_path": str(engine.checkpoints[0]), "weight_version": "0", "keep_pause": True}
    calls: list[tuple[str, str, Any]] = [
        ("GET", "/model_info", None),
        ("GET", "/server_info", None),
        ("GET", "/v1/loads", None),
        ("POST", "/generate", generate),
        ("POST", "/generate", score),
        ("POST", "/pause_generation", {"mode": "retract"}),
        ("POST", "/update_weights_from_disk", update),
        ("POST", "/weights_checker", {"action": "checksum"}),
        ("POST", "/update_weight_version", {"new_version": "0", "abort_all_requests": False}),
        ("POST", "/continue_generation", {}),
        ("GET", "/nothing", None),
    ]
    headers = {"Authorization": f"Bearer {KEY}", UPDATE_HEADER: str(fresh_number())}
    with EngineDouble(api_key=KEY, sglang=RELEASE) as double, httpx.Client(headers=headers) as http:
        double.shows_checksums = True
        for method, path, request in calls:
            real = http.request(method, f"{engine.spec.url}{path}", json=request)
            ours = http.request(method, f"{double.url}{path}", json=request)
            assert ours.status_code == real.status_code, path
            answers = [kinds_of(json.loads(answer.content)) for answer in (ours, real)]
            if path == "/weights_checker":
                for answer in answers:
                    answer["ranks"][0]["checksums"] = set(answer["ranks"][0]["checksums"].values())
            assert_part_of(answers[0], answers[1], path)


@pytest.mark.skipif(RELEASE != "0.5.23", reason="the record is one of 0.5.23")
def test_the_record_is_what_a_server_answers(engine: TinyEngine) -> None:
    """From it the tests of bad answers make theirs."""
    engine.load(0)
    found = ask_all(engine, fresh_number())
    for name, answer in recorded().items():
        assert kinds_of(answer) == kinds_of(found[name]), name


def test_the_router_asks_nobody_for_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the folder is gone that an engine was started with, as that of a first version is."""
    asked = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub, EngineDouble(api_key=KEY) as engine:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_address[1]}")
        route = engine.route
        info = dict(version=RELEASE, model_path="/gone", tokenizer_path="/gone")
        monkeypatch.setattr(engine, "route", lambda m, p, q: (200, info) if p == "/server_info" else route(m, p, q))
        port = free_port()
        router = start_router(port, KEY, log := tmp_path / "router.log", request_deadline_s=60)
        try:
            router.wait_ready(60)
            asyncio.run(_admit(f"http://127.0.0.1:{port}", engine.url))
            ends = time.monotonic() + 30
            while "tokenizer" not in log.read_text():  # it says that it could not read one, after it was told
                assert time.monotonic() < ends
                time.sleep(0.1)
            assert asked == []
            assert "huggingface" not in log.read_text().lower()
        finally:
            router.stop()
            hub.shutdown()
            thread.join()


def test_a_router_at_an_ipv6_address_answers_and_shows_its_metrics(tmp_path: Path) -> None:
    port, metrics_port = free_ports(2)
    router = start_router(port, KEY, tmp_path / "router.log", "::1", metrics_port, request_deadline_s=60)
    try:
        router.wait_ready(60)
        for url in (f"http://[::1]:{port}/liveness", f"http://[::1]:{metrics_port}/metrics"):
            assert httpx.get(url).status_code == 200
    finally:
        router.stop()


async def _admit(router_url: str, engine_url: str) -> None:
    router = RouterClient(router_url, KEY)
    await router.admit(engine_url)
    assert set(await router.workers()) == {engine_url}
    await router.close()


def test_a_fleet_behind_the_router_survives_the_death_of_an_engine(
    engines: dict[RolloutPrecision, TinyEngine], tmp_path: Path
) -> None:
    """Ends one of the servers: stays the last test of this module."""
    pair = [engines["fp32"], engines["fp8_tensor"]]
    urls = [engine.spec.url for engine in pair]
    port = free_port()
    router = start_router(port, KEY, tmp_path / "router.log", request_deadline_s=60)
    try:
        router.wait_ready(60)
        asyncio.run(_survive(urls, f"http://127.0.0.1:{port}", tmp_path, pair))
    finally:
        router.stop()


async def _survive(urls: list[str], router_url: str, folder: Path, pair: list[TinyEngine]) -> None:
    fleet = fleet_of(folder, urls, router=router_url, key=KEY)
    try:
        assert (await fleet.load(1, pair[0].checkpoints[1], WeightCheck(version=1))).keys() >= {
            "pause_s",
            "load_s",
            "checksum_s",
        }
        assert await fleet.versions() == dict.fromkeys(urls, 1)
        await asyncio.gather(*(fleet.generate(row, 2, Sampling(max_new_tokens=4)) for row in ROWS))
        tree = psutil.Process(pair[1].process.pid).children(recursive=True)
        assert len(tree) >= 2
        shared = shared_memory(tree)
        assert shared or RELEASE != "0.5.23"
        pair[1].process.kill()
        assert [path for path in shared if path.exists()] == [], "a killed engine leaves none"
        groups = await asyncio.gather(*(fleet.generate(row, 2, Sampling(max_new_tokens=4)) for row in ROWS * 2))
        assert {version for group in groups for sample in group for version in sample.versions} == {1}
        assert await fleet.versions() == {urls[0]: 1, urls[1]: None}
        ends = time.monotonic() + 10
        while any(map(_lives, tree)) and time.monotonic() < ends:
            await asyncio.sleep(0.1)
        assert not any(map(_lives, tree))
    finally:
        await fleet.close()


def shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """Files that an engine has named, and maps."""
    mapped = {Path(region.path) for process in processes for region in process.memory_maps()}
    return {path for path in mapped if path.is_relative_to("/dev/shm") and path.name.startswith("sglang_")}


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_an_engine_gives_up_its_memory_and_takes_it_back_however_often_it_is_asked(engine: TinyEngine) -> None:
    """SGLang's scheduler dies of parts that are released or resumed twice, as after a learner that was killed."""

    async def take_turns(client: EngineClient) -> str:
        assert (await client.dialect()).sleeps
        for _ in range(2):
            await client.sleep(deadline_s=30)
        asleep = (await client.model_info()).weight_version
        assert await client.health(), "its role need not take it for hung"
        await client.wake("weights", "cuda_graph", deadline_s=30)
        await load(client, 1, engine.checkpoints[1])
        for _ in range(2):
            await client.wake(deadline_s=30)
        return asleep

    assert engine.ask(take_turns) == "asleep"
    for ours, theirs in zip(engine.scores(), engine.expected(1), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    engine.load(0)
