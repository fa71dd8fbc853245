"""Evaluations: by one version where it is served long enough, else beside the run, and told by whom."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pipeline.data.batch import Prompt
from pipeline.data.event_log import read_events
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RewardError
from pipeline.rewards.pool import Verifiers
from pipeline.rollout.collector import Collector
from pipeline.schedule import Schedule
from tests.support.collecting import PROMPTS, build, collect, engines_of, learner

SYNC = Schedule(kind="sync", steps=3)
ASYNC = Schedule(kind="async", steps=6, lag=1)
STAGED = Schedule(kind="staged", steps=7, updates_per_stage=3)


def answer_from(collector: Collector, version: int) -> None:
    """End each held-out answer only once `version` is published; its second half is of the version served then."""
    held_out = held_out_of(collector)
    engines_of(collector).answers_from = lambda digits: version if digits in held_out else 0


def held_out_of(collector: Collector) -> set[str]:
    return {prompt.text.removesuffix("=") for prompt in collector.prompts.held_out(2)}


def records(run: RunDirectory) -> list[dict[str, Any]]:
    """The files of the evaluations, by the versions at which they were due; the log says the same."""
    found = [run.evaluation(version) for version in sorted(run.evaluated_versions())]
    names = ("version", "due", "answered", "skipped", "pass_at_1")
    told = sorted(read_events(run.path, "evaluated"), key=lambda event: event.get("due", event["version"]))
    assert [{name: one.get(name) for name in names} for one in found] == [
        {name: one.get(name) for name in names} for one in told
    ]
    return found


@pytest.mark.parametrize(
    ("schedule", "due"), [(SYNC, [0, 2, 3]), (STAGED, [0, 3, 6, 7])], ids=lambda value: getattr(value, "kind", "")
)
def test_where_a_version_is_served_long_enough_it_answers_all(
    run: RunDirectory, verifiers: Verifiers, schedule: Schedule, due: list[int]
) -> None:
    """Engines are slow and the learner is not: it would overtake every evaluation that no commit waits for."""
    collector = build(run, verifiers, schedule, evaluate_every=2)
    held_out = held_out_of(collector)
    engines_of(collector).latency_s = lambda digits: 0.1 if digits in held_out else 0.01
    collect(collector)
    assert [one["version"] for one in records(run)] == due
    assert not any({"due", "answered", "skipped"} & one.keys() for one in records(run))
    assert not read_events(run.path, "retried")


def test_a_stage_goes_on_to_its_last_batch_beside_the_evaluation(
    run: RunDirectory, verifiers: Verifiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = build(run, verifiers, STAGED, evaluate_every=6)
    ask, last_committed = collector._answers, list[bool]()

    async def late(prompt: Prompt, *arguments: Any) -> Any:
        async with asyncio.timeout(20.0):
            while not collector.store.path(1).exists():
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)  # long enough for the last commit, were it not to wait
        last_committed.append(collector.store.path(2).exists())
        return await ask(prompt, *arguments)

    monkeypatch.setattr(collector, "_answers", late)
    collect(collector)
    assert last_committed[:2] == [False, False]
    assert [one["version"] for one in records(run)] == [0, 6, 7]


def test_an_asynchronous_run_goes_on_and_the_record_says_who_answered(run: RunDirectory, verifiers: Verifiers) -> None:
    """The evaluation of version 0 is answered once version 2 is there, which comes after the commits of 0 and 1."""
    collector = build(run, verifiers, ASYNC, evaluate_every=100)
    answer_from(collector, 2)
    collect(collector)
    first, last = records(run)
    assert first["due"] == 0
    (begun, before), *others = first["answered"]
    assert begun == 0
    assert all(version >= 2 for version, _ in others)
    assert 0 < before <= sum(tokens for _, tokens in others), "half of each answer, rounded down, is of its beginning"
    assert first["version"] in {version for version, _ in first["answered"]}
    assert (last["version"], "due" in last) == (6, False)
    assert [event["seconds"]["evaluate"] < 0.5 for event in read_events(run.path, "committed")] == [True] * 6


def test_an_evaluation_that_is_overtaken_by_the_next_is_skipped(run: RunDirectory, verifiers: Verifiers) -> None:
    """That of version 0 ends when version 5 is published: by then those of 1 to 4 are past, and say nothing new."""
    collector = build(run, verifiers, ASYNC, evaluate_every=1)
    answer_from(collector, 5)
    collect(collector)
    first, second, *_ = found = records(run)
    assert first["due"] == 0
    assert second["skipped"][:4] == [1, 2, 3, 4]
    due = [version for one in found for version in (*one.get("skipped", ()), one.get("due", one["version"]))]
    assert due == [*range(7)]


def test_what_a_killed_collector_did_not_evaluate_is_answered_by_what_serves_now(
    run: RunDirectory, verifiers: Verifiers
) -> None:
    collector = build(run, verifiers, ASYNC, evaluate_every=4)
    answer_from(collector, 99)

    async def killed() -> None:
        tasks = asyncio.create_task(learner(run, ASYNC)), asyncio.create_task(collector.collect())
        async with asyncio.timeout(20.0):
            while run.published_version() < 3:
                await asyncio.sleep(0.005)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(killed())
    assert records(run) == []
    collect(build(run, verifiers, ASYNC, evaluate_every=4))
    first, *_ = found = records(run)
    assert first["version"] >= 3, "the versions before it are gone"
    assert min(version for version, _ in first.get("answered", [[4, 0]])) >= 3
    due = [version for one in found for version in (*one.get("skipped", ()), one.get("due", one["version"]))]
    assert due == [0, 4, 6]


def test_held_out_prompts_wait_for_the_batches_under_way_and_not_for_later_ones(
    run: RunDirectory, verifiers: Verifiers
) -> None:
    collector = build(run, verifiers, ASYNC, evaluate_every=100, concurrent_prompts=1)
    engines = engines_of(collector)
    engines.latency_s = lambda _digits: 0.01
    collect(collector)
    order = {collector.prompts.prompt(group).text.removesuffix("="): group for group in range(6 * PROMPTS)}
    asked = [order.get(digits, -1) for digits in engines.asked]
    assert asked[: 2 * PROMPTS + 2] == [*range(2 * PROMPTS), -1, -1]


def test_an_older_version_does_not_answer(run: RunDirectory, verifiers: Verifiers) -> None:
    run.set_published(1)
    collector = build(run, verifiers, Schedule(kind="sync", steps=1))
    engines_of(collector).faults = [0, 0]
    asyncio.run(collector._evaluate([1], 1))
    assert [event["version"] for event in read_events(run.path, "evaluated")] == [1]
    assert len(read_events(run.path, "retried")) == 2


def test_an_evaluation_that_fails_ends_the_collector(
    run: RunDirectory, verifiers: Verifiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside batches that nothing ends."""
    collector = build(run, verifiers, ASYNC)
    engines_of(collector).answers_from = lambda digits: 99

    async def fails(*arguments: Any) -> Any:
        raise RewardError("the judge is gone")

    monkeypatch.setattr(collector, "_answers", fails)

    async def within(seconds: float) -> None:
        async with asyncio.timeout(seconds):
            await collector.collect()

    with pytest.raises(RewardError, match="the judge is gone"):
        asyncio.run(within(10.0))
