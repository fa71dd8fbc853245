"""The collector against engines that misbehave: nothing lost, nothing trained twice, nothing stale committed."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.config.task_sections import SortDigitsTask
from pipeline.data.batch import FINISH_REASONS, Batch, Completion, EpisodeFacts, Prompt, Row, Sampling, StopReason
from pipeline.data.epochs import claim
from pipeline.data.event_log import read_events
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.episodes.episode import Ask, Episode
from pipeline.errors import (
    DeadlineExceededError,
    EngineUnavailableError,
    RecipeError,
    RewardError,
    SupersededError,
)
from pipeline.ports.affinity import Affinity
from pipeline.rewards.pool import Verdict, Verifiers
from pipeline.schedule import Schedule
from pipeline.tasks import build_task
from pipeline.tasks.digits import SortDigits
from pipeline.tasks.mixture import MixedOrder, Mixture, Source
from pipeline.tasks.tokenizer import Tokenizer
from pipeline.trainer.batches import describe
from tests.support.collecting import GROUP, PROMPTS, build, collect, engines_of

SCHEDULES = [
    Schedule(kind="sync", steps=3),
    Schedule(kind="async", steps=5, lag=2),
    Schedule(kind="staged", steps=5, updates_per_stage=2),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.kind)
def test_every_group_is_in_one_batch_and_every_token_is_fresh(
    run: RunDirectory, verifiers: Verifiers, schedule: Schedule
) -> None:
    store = collect(build(run, verifiers, schedule))
    batches = [store.read(i, None) for i in store.committed()]
    assert [b.index for b in batches] == list(range(schedule.steps))
    groups = [g for b in batches for g in b.group[::GROUP].tolist()]
    assert groups == list(range(schedule.steps * PROMPTS))
    for batch in batches:
        assert all(schedule.allows(batch.index, v) for v in batch.policy_version.tolist())
        assert batch.reward.tolist() == [1.0] * PROMPTS * GROUP
    evaluated = [event.get("due", event["version"]) for event in read_events(run.path, "evaluated")]
    assert evaluated[-1] == schedule.steps
    assert len(evaluated) == len(set(evaluated))
    assert run.evaluated_versions() == set(evaluated)


class Halved:
    """A second reward."""

    async def score_group(self, prompt: str, answer: str, metadata: object, responses: list[str], info: Any) -> Any:
        assert [sorted(one) for one in info] == [["finish", "prompt_tokens", "response_tokens"]] * len(responses)
        return [Verdict(reward=0.5)] * len(responses)


def test_each_source_has_its_share_and_its_own_reward(run: RunDirectory, verifiers: Verifiers) -> None:
    exact = build_task(SortDigitsTask(num_prompts=50), seed=0)
    other = SortDigits(SortDigitsTask(num_prompts=7), seed=1)
    other.reward = "halved"
    mixture = Mixture([Source("exact", 3.0, exact), Source("other", 1.0, other)])
    for steps in (2, 4):  # the second one goes on behind the first
        collector = build(run, verifiers, Schedule(kind="sync", steps=steps), given=mixture, evaluation_prompts=4)
        collector.verifiers = {exact.reward: verifiers, "halved": Halved()}  # type: ignore[dict-item]
        store = collect(collector)
    batches = [store.read(index, None) for index in range(4)]
    described = [describe(batch, batch.index)["sources"] for batch in batches]
    rewards = [(found["exact"]["reward_mean"], found["other"].get("reward_mean", 0.5)) for found in described]
    assert rewards == [(1.0, 0.5)] * 4
    order = MixedOrder(dict(exact=50, other=7), (3.0, 1.0), seed=0)
    asked = [problem for batch in batches for problem in batch.problem[::GROUP].tolist()]
    assert asked == [order.problem(group) for group in range(4 * PROMPTS)]
    for event in read_events(run.path, "evaluated"):
        assert event["sources"] == dict(
            exact=dict(prompts=3, pass_at_1=1.0, reward_mean=1.0, verifier_failures=0),
            other=dict(prompts=1, pass_at_1=0.0, reward_mean=0.5, verifier_failures=0),
        )
        assert (event["reward_mean"], event["verifier_failures"]) == (0.875, 0)


def test_what_goes_over_many_tokens_is_not_done_on_the_loop(
    run: RunDirectory, verifiers: Verifiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector, threads = build(run, verifiers, SCHEDULES[0]), dict[str, set[str]]()

    def noted(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread().name)
            return work(*arguments, **named)

        return call

    engines_of(collector).tokenizer = Tokenizer.load(run.path.parent / "model")  # it decodes prompts, on the loop
    monkeypatch.setattr(collector.tokenizer, "decode", noted("decode", collector.tokenizer.decode))
    monkeypatch.setattr(Batch, "from_groups", staticmethod(noted("build", Batch.from_groups)))
    monkeypatch.setattr(Batch, "interrupted", property(noted("count", Batch.interrupted.fget)))  # type: ignore[attr-defined]
    monkeypatch.setattr(BatchStore, "commit", noted("commit", BatchStore.commit))
    collect(collector)
    assert threads.keys() == {"decode", "build", "count", "commit"}
    assert threads["decode"] == {"beside-loop_0"}
    assert all(name.startswith("asyncio_") for name in threads["build"] | threads["count"] | threads["commit"])


def test_a_lag_that_was_decided_holds_from_its_batch_on(run: RunDirectory, verifiers: Verifiers) -> None:
    """After step 0 a lag of 1 is decided, for batch 4 and those after it: the first that may not have begun yet."""
    collector = build(run, verifiers, Schedule(kind="async", steps=9, lag=3))
    collector.decided_lags = lambda version: ((4, 1),) if version else ()
    store = collect(collector, seconds_per_step=0.05)
    oldest = [index - store.read(index, None).policy_version.min() for index in range(9)]
    assert max(oldest[1:4]) > 1, "the learner is too fast for this test"
    assert max(oldest[4:]) <= 1


def test_a_lag_that_was_decided_holds_for_batches_that_wait_already(run: RunDirectory, verifiers: Verifiers) -> None:
    """Batches 5 to 8 wait by a lag of 4 when the first of them learns that it is 1."""
    collector = build(run, verifiers, Schedule(kind="async", steps=9, lag=4))
    collector.decided_lags = lambda version: ((5, 1),) if version else ()
    collect(collector, seconds_per_step=0.05)
    issued = read_events(run.path, "issued")
    required = [collector.schedule.required_version(event["batch"]) for event in issued]
    assert required[5:] == [4, 5, 6, 7]
    assert [event for event, least in zip(issued, required, strict=True) if event["version"] < least] == []
    assert not read_events(run.path, "retried")


def test_an_answer_that_comes_late_takes_no_decided_lag_back(run: RunDirectory, verifiers: Verifiers) -> None:
    collector = build(run, verifiers, Schedule(kind="async", steps=9, lag=3))
    later = ((4, 1), (6, 0))
    collector.schedule = replace(collector.schedule, decided_lags=later)
    collector.decided_lags = lambda version: later[:1]
    asyncio.run(collector._wait_for_turn(3))
    assert collector.schedule.decided_lags == later


def test_what_was_evaluated_is_known_without_the_log(run: RunDirectory, verifiers: Verifiers) -> None:
    run.write_evaluation(0, {"pass_at_1": 0.5})
    collect(build(run, verifiers, Schedule(kind="sync", steps=1), evaluate_every=1))
    assert [event["version"] for event in read_events(run.path, "evaluated")] == [1]


def test_stale_aborted_and_refused_answers_are_sampled_again(run: RunDirectory, verifiers: Verifiers) -> None:
    run.set_published(1)
    collector = build(run, verifiers, Schedule(kind="sync", steps=2), evaluate_every=100)
    collector._evaluated.add(0)
    store = BatchStore(run.batches)
    store.commit(collect_one(run, verifiers))
    engines = engines_of(collector)
    engines.faults = [EngineUnavailableError("down"), 0, "abort", EngineUnavailableError("down")]
    collect(collector)
    batch = store.read(1, None)
    assert set(batch.policy_version.tolist()) == {1}
    assert "abort" not in {FINISH_REASONS[f] for f in batch.finish}
    assert engines.resyncs >= 4
    assert len(read_events(run.path, "retried")) == 4


def collect_one(run: RunDirectory, verifiers: Verifiers) -> Batch:
    """Batch 0 of the same run, made in a directory of its own."""
    other = RunDirectory(run.path.parent / "other")
    other.make_folders()
    other.set_published(0)
    return collect(build(other, verifiers, Schedule(kind="sync", steps=1))).read(0, None)


def test_a_started_again_collector_goes_on_behind_the_committed_batches(
    run: RunDirectory, verifiers: Verifiers
) -> None:
    collect(build(run, verifiers, Schedule(kind="sync", steps=2)))
    before = (run.batches / "000001.zarr.zip").read_bytes()
    store = collect(build(run, verifiers, Schedule(kind="sync", steps=4)))
    assert (run.batches / "000001.zarr.zip").read_bytes() == before
    assert store.read(3, None).group.min() == 3 * PROMPTS


def test_a_collector_that_is_asked_to_end_ends_in_order(run: RunDirectory, verifiers: Verifiers) -> None:
    collector = build(run, verifiers, Schedule(kind="sync", steps=3), wait_deadline_s=60.0)

    async def stopped_while_it_waits() -> bool:
        collecting = asyncio.create_task(collector.collect())
        while not collector.store.path(0).exists():
            await asyncio.sleep(0.005)
        collector.stop.set()  # nobody publishes version 1
        async with asyncio.timeout(20.0):
            return await collecting

    assert not asyncio.run(stopped_while_it_waits())
    assert engines_of(collector).in_flight == 0
    assert collector.store.committed() == [0]
    again = build(run, verifiers, Schedule(kind="sync", steps=3))
    assert collect(again).committed() == [0, 1, 2]


def test_a_superseded_collector_commits_and_says_nothing_more(run: RunDirectory, verifiers: Verifiers) -> None:
    """It waits for version 1 while another collector takes over, and ends then."""
    collector = build(run.under(claim(run.path, "collector")), verifiers, Schedule(kind="sync", steps=3))

    async def superseded_while_it_waits() -> None:
        collecting = asyncio.create_task(collector.collect())
        while not collector.store.path(0).exists():
            await asyncio.sleep(0.005)
        claim(run.path, "collector")
        async with asyncio.timeout(20.0):
            await collecting

    with pytest.raises(SupersededError, match="start 2 has taken over"):
        asyncio.run(superseded_while_it_waits())
    assert collector.store.committed() == [0]
    assert [event["batch"] for event in read_events(run.path, "issued")] == [0]


def test_a_prompt_that_cannot_fit_is_dropped_by_name(run: RunDirectory, verifiers: Verifiers) -> None:
    collector = build(run, verifiers, Schedule(kind="sync", steps=1), max_prompt_tokens=9, prompts_per_batch=8)
    batch = collect(collector).read(0, None)
    lengths = {g: len(collector.prompts.prompt(g).tokens) for g in range(8)}
    assert [d.group for d in batch.dropped] == [g for g, n in lengths.items() if n > 9] != []
    assert sorted(set(batch.group.tolist())) == [g for g, n in lengths.items() if n <= 9]
    assert "at most 9 fit" in batch.dropped[0].reason


@pytest.mark.parametrize("max_refills", [0, 2])
def test_a_batch_of_which_no_prompt_fits_is_not_committed(
    run: RunDirectory, verifiers: Verifiers, max_refills: int
) -> None:
    """No learner could take a step on it, whenever it is started."""
    schedule = Schedule(kind="sync", steps=1)
    collector = build(run, verifiers, schedule, max_prompt_tokens=1, prompts_per_batch=1, max_refills=max_refills)
    with pytest.raises(RecipeError, match=r"none of the [13] prompts of batch 0 .*at most 1 fit\); raise rollout.cont"):
        collect(collector)
    assert collector.store.committed() == []


def test_engines_that_never_answer_end_the_collector(run: RunDirectory, verifiers: Verifiers) -> None:
    collector = build(run, verifiers, Schedule(kind="sync", steps=1), wait_deadline_s=0.05, evaluate_every=100)
    engines = engines_of(collector)
    engines.faults = [EngineUnavailableError("down")] * 100_000
    with pytest.raises(DeadlineExceededError, match=r"not answered within .* down"):
        collect(collector)
    assert collector.store.committed() == []


def test_engines_that_fail_for_long_are_told_and_asked_ever_more_rarely(
    run: RunDirectory, verifiers: Verifiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """360 samples were asked again in a minute, and nothing was printed."""
    pauses: list[tuple[float, int]] = []

    def pause_s(first_s: float, failures: int) -> float:
        pauses.append((first_s, failures))
        return 0.01 * failures

    monkeypatch.setattr("pipeline.rollout.group_sampler.retry_pause_s", pause_s)
    changes: dict[str, Any] = dict(prompts_per_batch=1, evaluate_every=100, retry_s=0.25)
    collector = build(run, verifiers, Schedule(kind="sync", steps=1), **changes)
    monkeypatch.setattr(collector._sampler.patience, "first_s", 0.0)
    engines_of(collector).faults = [EngineUnavailableError("down")] * 5
    collect(collector)
    first, *_, last = read_events(run.path, "no_progress")
    assert (first["who"], first["over"], last["over"]) == ("the collector", False, True)
    assert "samples, such as those of group" in first["waits_for"]
    assert "down" in first["waits_for"]
    assert pauses == [(0.25, failures) for failures in range(1, 6)]
    retried = [event["time"] for event in read_events(run.path, "retried")]
    assert all(np.diff(retried) > [0.009, 0.018, 0.027, 0.036]), "it slept in between"


def test_a_version_that_is_never_published_ends_the_collector(run: RunDirectory, verifiers: Verifiers) -> None:
    collector = build(run, verifiers, Schedule(kind="sync", steps=2), wait_deadline_s=0.2)
    with pytest.raises(DeadlineExceededError, match="version 1 was not published"):
        asyncio.run(collector.collect())
    assert collector.store.committed() == [0]


def test_a_learner_that_still_trains_is_waited_for(run: RunDirectory, verifiers: Verifiers) -> None:
    """A stage has many steps between two publishes: it may take longer than the deadline, a single step may not."""
    schedule = Schedule(kind="staged", steps=2, updates_per_stage=1)
    collector = build(run, verifiers, schedule, wait_deadline_s=1.0, evaluate_every=100)
    collector._evaluated |= {0, 2}

    async def trains_for(steps: int) -> None:
        for step in range(steps):
            await asyncio.sleep(0.1)
            run.write_logprobs(step, np.zeros(1, np.float32))

    async def both(steps: int) -> None:
        training = asyncio.create_task(trains_for(steps))
        try:
            await collector.collect()
        finally:
            training.cancel()

    with pytest.raises(DeadlineExceededError, match=r"version 1 was not published within .* nor was a step trained"):
        asyncio.run(both(15))
    waited = [event["time"] for event in read_events(run.path, "issued")]
    assert len(waited) == 1
    assert run.learner_logprobs(14) is not None, "the clock ran while the learner trained"


def fail_on(monkeypatch: pytest.MonkeyPatch, verifiers: Verifiers, fails: Callable[[int], bool]) -> None:
    """Of the samples that are scored, those whose number `fails` says."""
    score_group, asked = verifiers.score_group, iter(range(10**6))

    async def maybe(*arguments: Any) -> list[Verdict]:
        failed = Verdict(reward=0.0, parts={"verifier_failed": 1.0}, failed="timeout")
        return [failed if fails(next(asked)) else verdict for verdict in await score_group(*arguments)]

    monkeypatch.setattr(verifiers, "score_group", maybe)


def test_nothing_is_learned_of_a_sample_without_a_reward(
    run: RunDirectory, verifiers: Verifiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_on(monkeypatch, verifiers, lambda number: number % 3 == 0)
    batch = collect(build(run, verifiers, Schedule(kind="sync", steps=1), evaluate_every=100)).read(0, None)
    assert 0 < (~batch.judged).sum() < batch.num_samples
    learned = np.repeat(batch.judged, batch.response_lengths)
    assert batch.loss_mask.tolist() == learned.tolist()
    assert not batch.rollout_logprobs[~learned].any()
    assert [event["interrupted"] for event in read_events(run.path, "committed")] == [0]


def test_held_out_samples_without_a_reward_are_counted_and_not_wrong(
    run: RunDirectory, verifiers: Verifiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_on(monkeypatch, verifiers, lambda number: number % 3 == 0)
    collect(build(run, verifiers, Schedule(kind="sync", steps=1)))
    for event in read_events(run.path, "evaluated"):
        assert event["pass_at_1"] == 1.0
        assert event["verifier_failures"] == event["prompts"] * event["samples"] - sum(event["judged"]) > 0


def test_a_batch_without_any_reward_is_not_committed(
    run: RunDirectory, verifiers: Verifiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_on(monkeypatch, verifiers, lambda number: True)
    with pytest.raises(RewardError, match=rf"no sample of batch 0 has a reward: .* on all {PROMPTS * GROUP}"):
        collect(build(run, verifiers, Schedule(kind="sync", steps=1)))
    assert list(run.batches.glob("*.zip")) == []


def test_turns_of_an_episode_ask_with_its_own_affinity_and_the_hits_are_told(
    run: RunDirectory, verifiers: Verifiers
) -> None:
    collector = build(run, verifiers, Schedule(kind="sync", steps=1))
    engines, asked = engines_of(collector), list[Affinity]()
    original = engines.generate

    async def generate(
        prompt: Sequence[int], num_samples: int, sampling: Sampling, affinity: Affinity | None = None
    ) -> list[Completion]:
        assert affinity is not None
        [found] = await original(collector.prompts.prompt(0).tokens, num_samples, sampling, affinity)
        asked.append(affinity)
        affinity.answered(prompt, replace(found, cached_tokens=2))
        return [found]

    engines.generate = generate  # type: ignore[method-assign]
    collector.episodes = TwoTurns()  # type: ignore[assignment]
    collect(collector)
    episodes = Counter(map(id, asked))
    held_out = collector.settings.evaluation_prompts * collector.settings.evaluation_samples
    assert set(episodes.values()) == {2}
    assert len(episodes) >= PROMPTS * GROUP + held_out
    [committed] = read_events(run.path, "committed")
    assert 0.0 < committed["prefix_hits"] < 1.0
    assert committed["prefix_hits"] * committed["prefix_tokens"] == pytest.approx(2 * (PROMPTS * GROUP + held_out))


class TwoTurns:
    """Episodes of two turns, the second behind the first."""

    chat = SimpleNamespace(stop_tokens=())

    async def run(self, prompt: Prompt, ask: Ask) -> Episode:
        first = await ask(prompt.tokens, 20)
        context = (*prompt.tokens, *first.tokens.tolist())
        second = await ask(context, 20)
        joined = Completion.joined([first, second], [()])
        row = Row(prompt=prompt.tokens, completion=replace(joined, kinds=np.zeros(len(joined.tokens), np.uint8)))
        facts = EpisodeFacts(stopped=StopReason.FINISHED, turns=1, tool_calls=0, tool_s=0.0)
        return Episode(rows=(row,), facts=facts, text="", reward=float(len(prompt.text) % 2))
