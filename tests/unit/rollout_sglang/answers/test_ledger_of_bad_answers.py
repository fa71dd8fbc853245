"""The real collector, fleet, client and store against engines that send every bad answer there is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.analysis.audit import verify_history
from pipeline.data.batch_values import Limits
from pipeline.data.event_log import read_events
from pipeline.data.store import BatchStore
from pipeline.errors import DeadlineExceededError
from pipeline.ports.engines import Sampling
from pipeline.rewards.pool import Verifiers
from pipeline.schedule import Schedule
from rollout_sglang import fleet as fleet_module
from rollout_sglang import monitor
from rollout_sglang.answers import record
from rollout_sglang.fleet import Fleet
from tests.doubles.bad_answers import BAD_ANSWERS, Spoil
from tests.doubles.sglang_double import EngineDouble
from tests.support.collecting import build, learner, new_run
from tests.support.fleets import members, settings

SYNC = Schedule(kind="sync", steps=2)
LIMITS = Limits(vocab_size=512, max_response_tokens=4)
SAMPLING = Sampling(max_new_tokens=4, vocab_size=512)


@pytest.fixture(scope="module")
def verifiers() -> Iterator[Verifiers]:
    with Verifiers("pipeline.rewards.verifiers:exact_match", workers=1, deadline_s=30.0, sandbox=None) as pool:
        yield pool


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "PERIOD_S", 0.05)
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
    monkeypatch.setattr(record, "MOST_BAD", 10_000)
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


def test_a_run_goes_on_beside_an_engine_that_sends_nothing_but_junk(tmp_path: Path, verifiers: Verifiers) -> None:
    with EngineDouble() as bad, EngineDouble() as good:
        bad.spoil = BAD_ANSWERS["a log-probability is positive"]
        run = collect(tmp_path, verifiers, [bad.url, good.url])
    assert verify_history(run, SYNC, SYNC.steps, limits=LIMITS).sound
    engines = [BatchStore(run / "batches").read(index, None).engine.tolist() for index in range(SYNC.steps)]
    assert {one for batch in engines for one in batch} == {1}
    reasons = [event["reason"] for event in read_events(run, "quarantined")]
    assert any("answers are bad" in reason and "log-probability 5, expected -128 to 0" in reason for reason in reasons)


def test_a_run_with_junk_alone_ends_at_its_deadline_and_says_why(tmp_path: Path, verifiers: Verifiers) -> None:
    with EngineDouble() as bad:
        bad.spoil = BAD_ANSWERS["a token is the size of the vocabulary"]
        with pytest.raises(DeadlineExceededError, match="id 512, expected 0 to 511"):
            collect(tmp_path, verifiers, [bad.url], wait_deadline_s=2.0)
    assert BatchStore(tmp_path / "run" / "batches").committed() == []
