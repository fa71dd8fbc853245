"""Several batches under way: how many, in which order, and which versions meet in one sample."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from pipeline.analysis.audit import verify_history
from pipeline.data.event_log import read_events
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import EngineUnavailableError
from pipeline.rewards.pool import Verifiers
from pipeline.schedule import Schedule
from tests.support.collecting import GROUP, PROMPTS, batches, build, collect, engines_of

STAGED = Schedule(kind="staged", steps=8, updates_per_stage=4)
NEVER = 10_000


def quiet(collector: object) -> None:
    """No evaluation, which would ask the engines too."""
    collector._evaluated |= set(range(100))  # type: ignore[attr-defined]


def test_a_stage_has_all_its_batches_in_flight_at_once(run: RunDirectory, verifiers: Verifiers) -> None:
    collector = build(run, verifiers, STAGED, concurrent_prompts=NEVER)
    quiet(collector)
    engines_of(collector).latency_s = lambda _digits: 0.1
    found = batches(collect(collector))
    assert engines_of(collector).most_in_flight == 4 * PROMPTS
    assert [set(batch.policy_version.tolist()) for batch in found] == [{0}] * 4 + [{4}] * 4
    assert found[0].next_group == 4 * PROMPTS
    assert found[0].open_groups == tuple(range(PROMPTS, 4 * PROMPTS))


@pytest.mark.parametrize("window", [0.0, 2.0, math.inf])
def test_a_slow_group_gives_its_place_until_its_window_ends(
    run: RunDirectory, verifiers: Verifiers, window: float
) -> None:
    """Group 1, of batch 0, is answered once version 1 is published where it may wait, else when nothing else is left.
    With 3 places a batch it may go to place 3, the first of batch 1, or as far as lag 3 allows, to batch 3."""
    schedule = Schedule(kind="async", steps=6, lag=3)
    collector = build(run, verifiers, schedule, window=window, concurrent_prompts=NEVER)
    quiet(collector)
    slow = collector.prompts.prompt(1).text.removesuffix("=")
    engines_of(collector).latency_s = lambda digits: 1.0 if digits == slow else 0.0
    found = batches(collect(collector))
    [at] = [batch.index for batch in found if 1 in batch.group]
    assert at == {0.0: 0, 2.0: 1, math.inf: 3}[window]
    groups = [batch.group[::GROUP].tolist() for batch in found]
    assert sorted(group for one in groups for group in one) == list(range(6 * PROMPTS))
    assert all(len(one) == PROMPTS for one in groups)
    assert all(schedule.allows(batch.index, v) for batch in found for v in batch.policy_version.tolist())
    assert verify_history(run.path, schedule, schedule.steps).sound


def test_concurrent_prompts_bounds_a_stage(run: RunDirectory, verifiers: Verifiers) -> None:
    collector = build(run, verifiers, STAGED, concurrent_prompts=5)
    quiet(collector)
    engines_of(collector).latency_s = lambda _digits: 0.01
    collect(collector)
    assert engines_of(collector).most_in_flight == 5


def test_the_oldest_batch_is_asked_first_also_what_is_asked_again(run: RunDirectory, verifiers: Verifiers) -> None:
    """One slot, 12 groups of 4 batches wait for it. Group 1 fails once: it overtakes all later batches."""
    collector = build(run, verifiers, STAGED, concurrent_prompts=1)
    quiet(collector)
    engines = engines_of(collector)
    # Group 0 answers; group 1 fails, and pauses; group 2 starts, and takes long enough for group 1 to be back.
    engines.latency_s = lambda _digits: 0.05
    answers = iter([None, EngineUnavailableError("down")])
    original = engines.generate

    async def generate(*arguments: object) -> object:
        fault = next(answers, None)
        engines.faults = [fault] if fault else []
        return await original(*arguments)  # type: ignore[arg-type]

    engines.generate = generate  # type: ignore[method-assign, assignment]
    collect(collector)
    order = {collector.prompts.prompt(group).text.removesuffix("="): group for group in range(12)}
    assert [order[digits] for digits in engines.asked[:13]] == [0, 1, 2, 1, *range(3, 12)]


def test_refills_of_an_old_batch_overtake_later_batches(run: RunDirectory, verifiers: Verifiers) -> None:
    """Group 0 says nothing: the group asked in its place, 12, goes before those of batches 1 to 3 that still wait when
    its rewards are known; a cold verifier takes a moment."""
    collector = build(run, verifiers, STAGED, concurrent_prompts=1, max_refills=1)
    quiet(collector)
    engines = engines_of(collector)
    order = {collector.prompts.prompt(group).text.removesuffix("="): group for group in range(50)}
    engines.solves = lambda digits, member: order[digits] == 0 or member == 0
    engines.latency_s = lambda _digits: 0.1
    found = batches(collect(collector))
    asked = [order[digits] for digits in engines.asked[:13]]
    assert asked.index(12) < asked.index(11)
    assert sorted(set(found[0].group.tolist())) == [1, 2, 12]


def test_a_partial_rollout_survives_a_publish(run: RunDirectory, verifiers: Verifiers) -> None:
    """Lag 1: batch 1 is under way with version 0 when version 1 comes. It keeps what it has; each token its version."""
    schedule = Schedule(kind="async", steps=2, lag=1)
    collector = build(run, verifiers, schedule)
    quiet(collector)
    engines = engines_of(collector)
    fast = {collector.prompts.prompt(group).text.removesuffix("=") for group in range(PROMPTS)}
    engines.answers_from = lambda digits: 0 if digits in fast else 1
    first, second = batches(collect(collector))
    assert set(first.policy_version.tolist()) == {0}
    offsets = second.response_offsets
    for sample in range(second.num_samples):
        versions = second.policy_version[offsets[sample] : offsets[sample + 1]].tolist()
        half = len(versions) // 2
        assert versions == [0] * half + [1] * (len(versions) - half)
    assert len(engines.asked) == 2 * PROMPTS, "nothing was sampled again"
    assert verify_history(run.path, schedule, 2).lags == {
        0: len(first.loss_mask) + int(np.sum(second.policy_version == 1)),
        1: int(np.sum(second.policy_version == 0)),
    }


def test_what_began_before_the_oldest_allowed_version_is_sampled_again(run: RunDirectory, verifiers: Verifiers) -> None:
    """Lag 1, batch 2 needs version 1, and an engine that still holds version 0 answers first."""
    schedule = Schedule(kind="async", steps=3, lag=1)
    collector = build(run, verifiers, schedule)
    quiet(collector)
    engines = engines_of(collector)
    stale = {collector.prompts.prompt(group).text.removesuffix("=") for group in range(2 * PROMPTS, 3 * PROMPTS)}
    once = set(stale)
    original = engines.generate

    async def generate(prompt: tuple[int, ...], *arguments: object) -> object:
        digits = engines.tokenizer.decode(prompt).removesuffix("=")
        answers = await original(prompt, *arguments)  # type: ignore[arg-type]
        if digits in once:
            once.discard(digits)
            return [replace(answer, versions=np.array([0, *answer.versions[1:]], np.int32)) for answer in answers]
        return answers

    engines.generate = generate  # type: ignore[method-assign, assignment]
    found = batches(collect(collector))
    assert found[2].policy_version.min() >= 1
    assert all(engines.asked.count(digits) == 2 for digits in stale)
    assert len(read_events(run.path, "retried")) == PROMPTS
    assert verify_history(run.path, schedule, 3).sound
    assert [batch.num_samples for batch in found] == [PROMPTS * GROUP] * 3
