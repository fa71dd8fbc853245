"""What a broken engine answers: refused by the client, kept out of the ledger, and the engine's own fault."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.analysis.audit import verify_history
from pipeline.data.batch import Sampling
from pipeline.data.batch_values import Limits
from pipeline.data.event_log import read_events
from pipeline.data.store import BatchStore
from pipeline.errors import BadAnswerError, DeadlineExceededError, EngineUnavailableError
from pipeline.rewards.pool import Verifiers
from pipeline.schedule import Schedule
from rollout_sglang import engine_pool
from rollout_sglang import fleet as fleet_module
from rollout_sglang.client import EngineClient
from rollout_sglang.engine_pool import MOST_BAD, WINDOW, AnswerRecord
from rollout_sglang.fleet import Fleet
from tests.doubles.bad_answers import BAD_ANSWERS, Spoil
from tests.doubles.sglang_double import EngineDouble, RouterDouble
from tests.support.collecting import build, learner, new_run
from tests.support.fleets import members, settings

SAMPLING = Sampling(max_new_tokens=4, vocab_size=512)
NAN = BAD_ANSWERS["a log-probability is NaN"]


@pytest.fixture
def engine() -> Iterator[EngineDouble]:
    with EngineDouble() as double:
        yield double


def ask(url: str, sampling: Sampling = SAMPLING) -> Any:
    async def main() -> Any:
        client = EngineClient(url, None, index=7, request_deadline_s=20)
        try:
            return await client.generate([5, 6], 2, sampling)
        finally:
            await client.close()

    return asyncio.run(main())


@pytest.mark.parametrize("kind", BAD_ANSWERS)
def test_the_client_refuses_it_in_one_line(engine: EngineDouble, kind: str) -> None:
    assert len(ask(engine.url)) == 2
    engine.spoil = BAD_ANSWERS[kind]
    with pytest.raises(BadAnswerError) as caught:
        ask(engine.url)
    message = str(caught.value)
    assert engine.url in message
    assert message.isprintable()
    assert len(message) < 600


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "x"])
def test_nothing_is_decompressed(engine: EngineDouble, encoding: str) -> None:
    engine.spoil = lambda samples: gzip.compress(json.dumps(samples).encode())
    engine.headers = {"Content-Encoding": encoding}
    with pytest.raises(BadAnswerError, match=f"in the encoding '{encoding}', which nobody asked for"):
        ask(engine.url)


def test_a_log_probability_of_minus_0_and_of_rounding_are_welcome(engine: EngineDouble) -> None:
    def spoil(samples: list[dict[str, Any]]) -> Any:
        samples[0]["meta_info"]["output_token_logprobs"][0][0] = -0.0
        samples[1]["meta_info"]["output_token_logprobs"][0][0] = 1.2e-7
        samples[1]["meta_info"]["output_token_logprobs"][1][0] = -103
        samples[1]["meta_info"]["e2e_latency"] = 1e30  # a clock that jumped: it cannot have taken longer than we waited
        return samples

    engine.spoil = spoil
    first, second = ask(engine.url)
    assert (first.logprobs[0], second.logprobs[1]) == (0.0, -103.0)
    assert second.generated_s < 20
    assert second.queued_s == 0.0


def fleet_of(folder: Path, urls: list[str], changes: list[dict[str, Any]], router: str | None = None) -> Fleet:
    taken = settings(folder, deadline_s=2.0, load_deadline_s=2.0)
    taken["on_change"] = lambda kind, **fields: changes.append(fields | {"kind": kind})
    return Fleet(members(folder, urls, router), **taken)


def kinds_of(changes: list[dict[str, Any]], engine: int | None) -> Counter[str]:
    return Counter(change["kind"] for change in changes if change["engine"] == engine)


def generate(fleet: Fleet, requests: int) -> Counter[int]:
    """Which engine answered how many of the requests, asked one after the other."""

    async def main() -> Counter[int]:
        try:
            groups = [await fleet.generate([1], 1, SAMPLING) for _ in range(requests)]
            return Counter(group[0].engine for group in groups)
        finally:
            await fleet.close()

    return asyncio.run(main())


def test_an_engine_that_sends_junk_is_left_out_and_the_others_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_pool, "FIRST_PAUSE_S", 60.0)
    changes: list[dict[str, Any]] = []
    with EngineDouble() as bad, EngineDouble() as good:
        bad.spoil = NAN
        assert generate(fleet_of(tmp_path, [bad.url, good.url], changes), 6) == {1: 6}
        assert bad.calls.count("POST /generate") == MOST_BAD
    assert kinds_of(changes, 0) == {"joined": 1, "admitted": 1, "bad_answer": MOST_BAD, "quarantined": 1}
    [reason] = [change["reason"] for change in changes if change["kind"] == "quarantined"]
    assert f"3 of its last {WINDOW} answers are bad, the last one: " in reason
    assert "output_token_logprobs.3.0: Input should be a finite number" in reason


def test_an_error_of_one_request_is_no_reason_to_leave_an_engine_out(tmp_path: Path) -> None:
    """SGLang answers 500 to a request that lacks memory, 503 to one that finds the queue full, and does all others."""
    changes: list[dict[str, Any]] = []
    with EngineDouble() as one, EngineDouble() as other:
        one.generate_faults = ["500", None, "500"]
        answered = generate(fleet_of(tmp_path, [one.url, other.url], changes), 4)
        assert one.calls.count("POST /generate") == 4
    assert answered == {0: 2, 1: 2}
    assert kinds_of(changes, 0) == {"joined": 1, "admitted": 1, "bad_answer": 2}
    reasons = [change["reason"] for change in changes if change["kind"] == "bad_answer"]
    assert all("POST" in reason and "answered 500: " in reason for reason in reasons)


def test_an_engine_that_answers_only_errors_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "FIRST_PAUSE_S", 60.0)
    changes: list[dict[str, Any]] = []
    with EngineDouble() as bad, EngineDouble() as good:
        bad.generate_faults = ["500"] * 99
        assert generate(fleet_of(tmp_path, [bad.url, good.url], changes), 6) == {1: 6}
        assert bad.calls.count("POST /generate") == MOST_BAD
    assert kinds_of(changes, 0) == {"joined": 1, "admitted": 1, "bad_answer": MOST_BAD, "quarantined": 1}


@pytest.mark.parametrize("fault", ["drop", "hang"])
def test_an_engine_that_breaks_off_or_hangs_is_left_out_at_once(tmp_path: Path, fault: str) -> None:
    changes: list[dict[str, Any]] = []
    with EngineDouble() as bad, EngineDouble() as good:
        bad.generate_faults = [fault] * 3  # type: ignore[list-item]
        assert generate(fleet_of(tmp_path, [bad.url, good.url], changes), 1) == {1: 1}
    assert kinds_of(changes, 0) == {"joined": 1, "admitted": 1, "quarantined": 1}


def test_an_only_engine_that_sends_junk_is_named_at_the_deadline(tmp_path: Path) -> None:
    with EngineDouble() as bad:
        bad.spoil = NAN
        with pytest.raises(EngineUnavailableError, match=r"(in a row|none of 1 engines).*output_token_logprobs"):
            generate(fleet_of(tmp_path, [bad.url], []), 1)


def test_an_engine_that_is_well_again_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "FIRST_PAUSE_S", 0.05)
    changes: list[dict[str, Any]] = []
    with EngineDouble() as engine:
        left = [NAN] * MOST_BAD
        engine.spoil = lambda samples: left.pop()(samples) if left else samples
        assert generate(fleet_of(tmp_path, [engine.url], changes), 3) == {0: 3}
    assert kinds_of(changes, 0) == {"joined": 1, "admitted": 2, "bad_answer": 3, "quarantined": 1}


def test_behind_a_router_the_one_at_fault_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "FIRST_PAUSE_S", 60.0)
    changes: list[dict[str, Any]] = []
    with EngineDouble() as bad, EngineDouble() as good, RouterDouble([bad.url, good.url]) as router:
        bad.spoil = NAN
        generate(fleet_of(tmp_path, [bad.url, good.url], changes, router.url), 8)
        assert router.members == [good.url]
    assert kinds_of(changes, None) == {"bad_answer": 1}
    assert kinds_of(changes, 0)["quarantined"] == 1
    assert "quarantined" not in kinds_of(changes, 1)


def test_an_engine_that_errs_rarely_stays_and_one_that_errs_again_is_left_out_for_longer() -> None:
    rare = AnswerRecord()
    for _ in range(20):
        assert not rare.bad()
        for _ in range(WINDOW // 2):
            rare.good()
    assert rare.until <= time.monotonic()
    often, pauses = AnswerRecord(), []
    for _ in range(12):
        assert [often.bad() for _ in range(MOST_BAD)] == [False] * (MOST_BAD - 1) + [True]
        pauses.append(round(often.until - time.monotonic()))
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]
    assert often.until > time.monotonic()
    for _ in range(WINDOW):
        often.good()
    assert often.times == 0


SYNC = Schedule(kind="sync", steps=2)
LIMITS = Limits(vocab_size=512, max_response_tokens=4)


@pytest.fixture(scope="module")
def verifiers() -> Iterator[Verifiers]:
    with Verifiers("pipeline.rewards.verifiers:exact_match", workers=1, deadline_s=30.0, sandbox=None) as pool:
        yield pool


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "PERIOD_S", 0.05)
    monkeypatch.setattr(fleet_module, "_FIRST_RETRY_PAUSE_S", 0.0)


def collect(folder: Path, verifiers: Verifiers, urls: list[str], **changes: Any) -> Path:
    """A run of two steps over these engines; its directory."""
    run = new_run(folder)
    collector = build(run, verifiers, SYNC, sampling=SAMPLING, evaluation_sampling=SAMPLING, **changes)
    collector.store = BatchStore(run.batches, run.fence, limits=LIMITS)
    taken = settings(folder, deadline_s=changes.get("wait_deadline_s", 20.0), load_deadline_s=5.0)
    taken["on_change"] = collector.event_log.event

    async def both() -> None:
        fleet = Fleet(members(folder, urls), **taken)
        collector.engines = fleet
        collector._sampler = collector._sampler.__class__(**{**vars(collector._sampler), "engines": fleet})
        version = run.published_version
        training = asyncio.create_task(learner(run, SYNC))
        try:
            async with fleet.monitored(lambda: (version(), run.policy_directory(version()))):
                await collector.collect()
        finally:
            training.cancel()
            await fleet.close()

    asyncio.run(both())
    return run.path


def test_no_bad_answer_gets_into_the_ledger_and_the_run_finishes(
    tmp_path: Path, verifiers: Verifiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine sends each kind once; it is not left out for it, so that it gets to send them all."""
    monkeypatch.setattr(engine_pool, "MOST_BAD", 10_000)
    monkeypatch.setattr("pipeline.rollout.group_sampler.retry_pause_s", lambda *_: 0.0)
    left: dict[str, Spoil] = dict(BAD_ANSWERS)

    def spoil(samples: list[dict[str, Any]]) -> Any:
        if not left or not samples or not samples[0]["output_ids"]:
            return samples
        return left.pop(next(iter(left)))(samples)

    with EngineDouble() as engine:
        engine.spoil = spoil
        run = collect(tmp_path, verifiers, [engine.url])
    assert left == {}
    refused = read_events(run, "bad_answer")
    assert len(refused) == len(BAD_ANSWERS)
    assert all(event["reason"].isprintable() for event in refused)
    audit = verify_history(run, SYNC, SYNC.steps, limits=LIMITS)
    assert (audit.sound, audit.batches) == (True, SYNC.steps)
    for index in range(SYNC.steps):
        batch = BatchStore(run / "batches").read(index, None, check=False)
        assert np.isin(batch.response_tokens, np.arange(8)).all(), "what the double samples, and nothing else"
        np.testing.assert_array_equal(batch.rollout_logprobs, -(batch.response_tokens + 1) / 8)
        assert set(batch.response_lengths.tolist()) == {4}


def test_a_run_with_junk_alone_ends_at_its_deadline_and_says_why(tmp_path: Path, verifiers: Verifiers) -> None:
    with EngineDouble() as bad:
        bad.spoil = BAD_ANSWERS["a token is the size of the vocabulary"]
        with pytest.raises(DeadlineExceededError, match="id 512, expected 0 to 511"):
            collect(tmp_path, verifiers, [bad.url], wait_deadline_s=2.0)
    assert BatchStore(tmp_path / "run" / "batches").committed() == []
