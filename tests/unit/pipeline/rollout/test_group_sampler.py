"""Calls that end together, answers that are cut, and a teacher's scores."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.advantages.compute import mean_reverse_kl, taught
from pipeline.background import Patience
from pipeline.data.batch import Completion, Prompt, Sampling
from pipeline.data.event_log import EventLog, read_events
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import EngineUnavailableError, EvenKeelError, RewardError
from pipeline.ports.affinity import Affinity
from pipeline.rewards.pool import FailureWatch, Verifiers
from pipeline.rollout.group_sampler import GroupSampler, Interruption, TeacherScores, gather_or_cancel
from pipeline.rollout.slots import Slots
from pipeline.schedule import Schedule
from pipeline.trainer.batches import describe
from tests.support.collecting import GROUP, PROMPTS, batches, build, collect


def test_a_prompt_that_waits_for_its_turn_after_a_failure_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine is lost, others' prompts take an hour, and then the prompt fails once more."""
    now = [0.0]
    monkeypatch.setattr("pipeline.rollout.group_sampler.time.monotonic", lambda: now[0])
    slots, answers = (
        Slots(1),
        [EngineUnavailableError("lost"), EngineUnavailableError("again"), Completion.given([3], [-0.5])],
    )

    class Engines:
        async def generate(
            self, prompt: Sequence[int], num_samples: int, sampling: Sampling, affinity: Affinity | None = None
        ) -> list[Completion]:
            if isinstance(answer := answers.pop(0), Exception):
                raise answer
            return [answer]

    async def others() -> None:
        if len(answers) == 2:  # in the pause after the first failure, before the prompt asks for a slot again
            first = slots.acquire((0, 0))
            await first.__aenter__()

            async def an_hour() -> None:
                while not slots.num_waiting:
                    await asyncio.sleep(0)
                now[0] += 3600.0
                await first.__aexit__(None, None, None)

            beside.append(asyncio.create_task(an_hour()))

    beside: list[asyncio.Task[None]] = []
    sampler = GroupSampler(
        engines=Engines(),  # type: ignore[arg-type]
        slots=slots,
        resync=others,
        event_log=EventLog(tmp_path, "collector-000001"),
        interruption=None,
        deadline_s=60.0,
        retry_s=0.0,
        patience=Patience(lambda *_, **__: None, "the test", "engines"),
    )
    prompt = Prompt(group=0, text="p", answer="a", tokens=(1,))

    async def run() -> list[Completion]:
        return await sampler.sample(prompt, 1, Sampling(max_new_tokens=1), priority=(0, 1), allowed=lambda _: True)

    assert len(asyncio.run(run())) == 1
    assert now == [3600.0]


def test_gather_or_cancel_leaves_nothing_running() -> None:
    async def run() -> list[str]:
        ended: list[str] = []

        async def slow() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append("slow")

        async def fails() -> None:
            await asyncio.sleep(0)
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await gather_or_cancel([slow(), fails()])
        return ended

    assert asyncio.run(run()) == ["slow"]


def test_gather_or_cancel_is_cancelled_with_its_caller() -> None:
    async def run() -> list[str]:
        ended: list[str] = []

        async def slow(name: str) -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(name)

        caller = asyncio.create_task(gather_or_cancel([slow("first"), slow("second")]))
        await asyncio.sleep(0.01)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        return ended

    assert sorted(asyncio.run(run())) == ["first", "second"]


def test_the_loop_has_its_turn_after_the_beginning_of_each() -> None:
    """A hundred requests that begin in one turn of the loop stop it for as long as all of them take to begin."""
    turns, begun = [0], list[int]()

    async def tick() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    async def begin() -> None:
        begun.append(turns[0])

    async def run() -> None:
        ticking = asyncio.create_task(tick())
        await gather_or_cancel([begin() for _ in range(10)])
        ticking.cancel()

    asyncio.run(run())
    assert len(set(begun)) == 10


def interruption(first: int = 10, last: int = 12, seed: int = 0) -> Interruption:
    return Interruption(from_tokens=first, to_tokens=last, phrase=(7, 8), answer_tokens=4, seed=seed)


def test_golden_cut() -> None:
    """The first 8 bytes of sha256("interruption/5/-3/1"), little-endian, modulo 3."""
    digest = hashlib.sha256(b"interruption/5/-3/1").digest()
    assert interruption(seed=5).cut_after(-3, 1) == 10 + int.from_bytes(digest[:8], "little") % 3


@given(st.integers(1, 50), st.integers(0, 9), st.integers(0, 5), st.integers(-9, 9), st.integers(0, 9))
def test_cuts_stay_in_bounds(first: int, spread: int, seed: int, group: int, sample: int) -> None:
    cut = interruption(first, first + spread, seed).cut_after(group, sample)
    assert first <= cut <= first + spread


PROMPT = Prompt(group=0, text="1=", answer="1", tokens=(1, 2))
COMPLETIONS = [Completion.given([3, 4], [-0.5, -0.5]), Completion.given([5], [-0.5])]


@dataclass
class PretendTeacher:
    """Finds every token as likely as `logprob` says, after `faults`, one a call."""

    logprob: float = -1.25
    faults: list[Exception] = field(default_factory=list)
    refuses: tuple[int, ...] = ()
    """First tokens of prompts that it never scores."""
    calls: int = 0

    async def logprobs(self, prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        self.calls += 1
        if self.faults:
            raise self.faults.pop(0)
        if prompt[0] in self.refuses:
            raise EngineUnavailableError("no")
        return [np.full(len(response), self.logprob, np.float32) for response in responses]


def scores(teacher: PretendTeacher, *, most: float = 1.0, **options: Any) -> TeacherScores:
    watch = FailureWatch("the teacher", most, at_least=1, remedy="look at the teacher's servers")
    return TeacherScores(teacher=teacher, retries=2, watch=watch, first_pause_s=0.0, **options)


def test_it_is_asked_again() -> None:
    teacher = PretendTeacher(faults=[EngineUnavailableError("once"), EngineUnavailableError("twice")])
    found = asyncio.run(scores(teacher).of(PROMPT, COMPLETIONS))
    said = [one.teacher_logprobs for one in found]
    assert [each.tolist() for each in said if each is not None] == [[-1.25] * 2, [-1.25]]
    assert teacher.calls == 3


def test_after_the_last_attempt_nothing_is_learned_from_the_group() -> None:
    found = asyncio.run(scores(PretendTeacher(refuses=(1,))).of(PROMPT, COMPLETIONS))
    assert [one.loss_mask.any() for one in found] == [False, False]
    with pytest.raises(RewardError, match=r"^the teacher failed on 1 of 1 samples.*look at the teacher's servers"):
        asyncio.run(scores(PretendTeacher(refuses=(1,)), most=0.0).of(PROMPT, COMPLETIONS))


def test_a_server_that_never_comes_back_ends_the_collector() -> None:
    def gone() -> None:
        raise EngineUnavailableError("the teacher's server was killed")

    with pytest.raises(EvenKeelError, match="was killed"):
        asyncio.run(scores(PretendTeacher(refuses=(1,)), require_alive=gone).of(PROMPT, COMPLETIONS))


def test_batches_and_evaluations_know_the_distance(run: RunDirectory, verifiers: Verifiers) -> None:
    """The engines say -0.5 of every token, the teacher -1.25: three quarters of a nat."""
    collector = build(run, verifiers, Schedule(kind="sync", steps=2))
    collector.teacher = scores(PretendTeacher())
    stored = batches(collect(collector))
    for batch in stored:
        assert batch.teacher_logprobs is not None
        assert mean_reverse_kl(batch) == 0.75
        assert describe(batch, 0)["reverse_kl"] == 0.75
    evaluated = read_events(run.path, "evaluated")
    assert [event["reverse_kl"] for event in evaluated] == [0.75] * len(evaluated)


def test_a_group_that_it_does_not_score_keeps_its_rewards_and_teaches_nothing(
    run: RunDirectory, verifiers: Verifiers
) -> None:
    collector = build(run, verifiers, Schedule(kind="sync", steps=1))
    first = collector.prompts.prompt(0).tokens[0]
    asked = [collector.prompts.prompt(group).tokens[0] for group in range(PROMPTS)]
    collector.teacher = scores(PretendTeacher(refuses=(first,)))
    (batch,) = batches(collect(collector))
    lost = np.repeat([token == first for token in asked], GROUP)
    assert 0 < lost.sum() < PROMPTS * GROUP
    assert taught(batch).tolist() == (~lost).tolist()
    assert batch.judged.all(), "the verifier did not fail"
    assert batch.reward.all(), "the pretended engines answer rightly"
    assert batch.teacher_logprobs is not None
    masked = np.repeat(lost, batch.response_lengths)
    assert not batch.loss_mask[masked].any()
    assert not batch.teacher_logprobs[masked].any()
    found = describe(batch, 0)
    assert (found["verifier_failures"], found["teacher_failures"]) == (0.0, lost.sum())
    assert "reward_parts" not in found
    (committed,) = read_events(run.path, "committed")
    assert committed["interrupted"] == 0
    assert mean_reverse_kl(batch) == 0.75


def test_a_held_out_answer_that_it_does_not_score_is_still_right(run: RunDirectory, verifiers: Verifiers) -> None:
    collector = build(run, verifiers, Schedule(kind="sync", steps=1))
    refused = [prompt.tokens[0] for prompt in collector.prompts.held_out(1)]
    collector.teacher = scores(PretendTeacher(refuses=tuple(refused)))
    collect(collector)
    for event in read_events(run.path, "evaluated"):
        assert event["pass_at_1"] == 1.0
        assert event["verifier_failures"] == 0 < event["teacher_failures"]
        assert event["reward_parts"] == {}


def test_a_batch_of_which_it_scored_nothing_is_not_committed(run: RunDirectory, verifiers: Verifiers) -> None:
    collector = build(run, verifiers, Schedule(kind="sync", steps=1), evaluate_every=100)
    asked = tuple(collector.prompts.prompt(group).tokens[0] for group in range(PROMPTS))
    collector.teacher = scores(PretendTeacher(refuses=asked))
    with pytest.raises(RewardError, match=rf"the teacher scored none of the {PROMPTS * GROUP} samples of batch 0"):
        collect(collector)
