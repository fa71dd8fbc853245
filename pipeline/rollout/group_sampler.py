"""Sample the completions of a prompt despite failures and new versions of the engines, and have a teacher score them.

slots ──priority──▶ engines ──answers──▶ is every token's version allowed? ──no──▶ resync, ask for missing samples
                    ▲                                                                             │
                    └─────────────────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.background import Patience, beside_loop, retry_pause_s
from pipeline.data.batch import TEACHER_FAILED, Completion, Prompt, Sample, Sampling
from pipeline.data.batch_values import LOWEST_LOGPROB
from pipeline.data.event_log import EventLog
from pipeline.errors import DeadlineExceededError, EngineVersionError, RetryableError
from pipeline.ports.affinity import Affinity
from pipeline.rewards.pool import FailureWatch
from pipeline.rollout.slots import Priority, Slots

if TYPE_CHECKING:
    from rollout_sglang.client import TeacherServers
    from rollout_sglang.fleet import Fleet


@dataclass(frozen=True, kw_only=True)
class GroupSampler:
    """A sampler of prompts at the engines, as many at once as there are slots."""

    engines: Fleet
    slots: Slots
    resync: Callable[[], Awaitable[None]]
    """Called after a failure, before the prompt is asked again."""
    event_log: EventLog
    interruption: Interruption | None
    deadline_s: float
    """Longest time, in seconds, without a sample of the prompt after a failure."""
    retry_s: float
    """Pause after a prompt's first failure; it doubles with each failure in a row."""
    patience: Patience
    """Shared by all prompts: a sample of any prompt is progress."""

    async def sample(
        self,
        prompt: Prompt,
        wanted: int,
        sampling: Sampling,
        *,
        priority: Priority,
        allowed: Callable[[int], bool],
        begins: Callable[[], None] = lambda: None,
        affinity: Affinity | None = None,
    ) -> list[Completion]:
        """Sample `wanted` completions whose every token has an allowed version; a completion may mix versions. Missing
        samples are sampled again, so a dead engine or a newer policy costs only time. `begins` is called before each
        request, until a sample is accepted. `affinity` is that of the episode of which this is a turn. Raises
        DeadlineExceededError when no sample has come for `deadline_s`."""
        accepted: dict[int, Completion] = {}
        give_up: float | None = None
        failures = 0
        while missing := [member for member in range(wanted) if member not in accepted]:
            waited = time.monotonic()
            async with self.slots.acquire(priority) as asked:
                if give_up is not None:
                    give_up += time.monotonic() - waited
                if not accepted:
                    begins()
                answers = await self._ask(prompt, missing, sampling, affinity)
            fresh = {
                member: answer
                for member, answer in zip(missing, answers, strict=True)
                if isinstance(answer, Completion)
                and answer.finish != "abort"
                and all(map(allowed, answer.distinct_versions))
            }
            accepted |= fresh
            if fresh:
                self.patience.progress()
                self.slots.answered(asked, sum(answer.retractions for answer in fresh.values()))
            if len(fresh) == len(missing):
                break
            if fresh or give_up is None:  # the clock starts at a failure, and stops while the prompt has no slot
                give_up = time.monotonic() + self.deadline_s
                failures = 0
            failures += 1
            refused = EngineVersionError("samples were aborted or of a stale version")
            error = next((answer for answer in answers if isinstance(answer, RetryableError)), refused)
            if time.monotonic() > give_up:
                raise DeadlineExceededError(
                    f"group {prompt.group} was not answered within {self.deadline_s:.0f} s: {error}; see "
                    "logs/engine-*.log"
                ) from error
            self.event_log.event("retried", group=prompt.group, reason=str(error))
            self.patience.still(f"samples, such as those of group {prompt.group}: {error}")
            await self.resync()
            await asyncio.sleep(retry_pause_s(self.retry_s, failures))
        return [accepted[member] for member in range(wanted)]

    async def _ask(
        self, prompt: Prompt, members: Sequence[int], sampling: Sampling, affinity: Affinity | None
    ) -> Sequence[Completion | RetryableError]:
        """Return, for each member, its completion or why there is none."""
        if self.interruption is not None:
            cuts = [(member, self.interruption) for member in members]
            return await gather_or_cancel([self._interrupted(prompt, *cut, sampling) for cut in cuts])
        try:
            return await self.engines.generate(prompt.tokens, len(members), sampling, affinity)
        except RetryableError as error:
            return [error] * len(members)

    async def _interrupted(
        self, prompt: Prompt, member: int, interruption: Interruption, sampling: Sampling
    ) -> Completion | RetryableError:
        """Sample a completion up to its cut and, unless it ended before, from the phrase to its end."""
        to_cut = replace(sampling, max_new_tokens=interruption.cut_after(prompt.group, member))
        to_end = replace(sampling, max_new_tokens=interruption.answer_tokens)
        try:
            [thought] = await self.engines.generate(prompt.tokens, 1, to_cut)
            if thought.finish != "length":
                return thought
            continued = (*prompt.tokens, *thought.tokens.tolist(), *interruption.phrase)
            [answer] = await self.engines.generate(continued, 1, to_end)
        except RetryableError as error:
            return error
        return await beside_loop(Completion.joined, [thought, answer], [interruption.phrase])


Result = TypeVar("Result")


async def gather_or_cancel(work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return the results in order. When a call fails, or the caller is cancelled, cancel the others and wait for them.
    A failure is raised as it is, not in a group: callers and the supervisor distinguish errors by type. A cancelled
    caller gets CancelledError, whatever failed meanwhile. The loop runs other tasks after each call begins: a request
    begins with a millisecond of work, and a hundred together would block the loop for a tenth of a second."""
    if not work:
        return []
    # Not a TaskGroup: there a failure may hide the cancellation of its caller.
    tasks: list[asyncio.Task[Result]] = []
    try:
        for item in work:
            tasks.append(asyncio.create_task(item))
            await asyncio.sleep(0)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        return [task.result() for task in tasks if task.done()]  # where not all are done, one of them raises
    finally:
        for item in work[len(tasks) :]:
            item.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """A cut of an unfinished response at a random length, with a phrase that makes the model come to its answer.
    ScaleRL (arXiv 2510.13786, section 2) cuts thoughts between 10,000 and 12,000 tokens with "Okay, time is up. Let me
    stop thinking and formulate an answer now. </think>". The model reads the tokens of the phrase, but no engine
    sampled them, so they are masked from the loss."""

    from_tokens: int
    to_tokens: int
    """The cut is drawn from from_tokens … to_tokens, both included."""
    phrase: tuple[int, ...]
    answer_tokens: int
    seed: int

    def cut_after(self, group: int, sample: int) -> int:
        """Return the number of tokens after which sample `sample` of a group is cut; equal each time it is sampled."""
        digest = hashlib.sha256(f"interruption/{self.seed}/{group}/{sample}".encode()).digest()
        return self.from_tokens + int.from_bytes(digest[:8], "little") % (self.to_tokens - self.from_tokens + 1)


@dataclass(frozen=True, kw_only=True)
class TeacherScores:
    """A client that has a teacher score sampled tokens, with retries. A group that no server scores is left out of the
    loss; its rewards are kept. Too many of them end the run (reward.max_failed_share)."""

    teacher: TeacherServers
    retries: int
    watch: FailureWatch
    require_alive: Callable[[], None] = lambda: None
    """Called after a failure; raises when no server will ever answer again."""
    first_pause_s: float = 0.5

    async def of(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Completion]:
        """Return the completions with the teacher's log-probabilities, or masked from the loss where it gave none.
        Log-probabilities below -128, the least of any engine, are stored as -128. Raises RewardError when too many
        recent samples were not scored, and errors of `require_alive`."""
        responses = [completion.tokens.tolist() for completion in completions]
        for failures in range(1, self.retries + 2):
            try:
                found = await self.teacher.logprobs(prompt.tokens, responses)
            except RetryableError as error:
                reason = str(error)
                self.require_alive()
                if failures <= self.retries:
                    await asyncio.sleep(retry_pause_s(self.first_pause_s, failures))
            else:
                for _ in completions:
                    self.watch.judged()
                return [_taught(*each) for each in zip(completions, found, strict=True)]
        for _ in completions:
            self.watch.failed("no answer", reason)
        return [_taught(one.unlearned(), np.zeros(len(one.tokens), np.float32)) for one in completions]


def _taught(completion: Completion, logprobs: NDArray[np.float32]) -> Completion:
    """Return the completion with the teacher's log-probabilities; 0.0 for tokens that no engine sampled."""
    possible = np.maximum(logprobs, np.float32(LOWEST_LOGPROB))
    return replace(completion, teacher_logprobs=np.where(completion.loss_mask, possible, np.float32(0.0)))


def distance_from_teacher(answers: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Return `reverse_kl` of held-out answers, in nats per token, of the student as evaluations sample it, estimated on
    its tokens; missing where the teacher scored none. `teacher_failures` counts the samples that it did not score."""
    scored = [
        (sample.completion.logprobs, sample.completion.teacher_logprobs, sample.completion.loss_mask)
        for each in answers
        for sample in each
    ]
    gaps = [(own.astype(np.float64) - said)[mask] for own, said, mask in scored if said is not None]
    tokens = sum(map(len, gaps))
    distance = {"reverse_kl": float(sum(gap.sum() for gap in gaps)) / tokens} if tokens else {}
    return distance | dict(
        teacher_failures=sum(TEACHER_FAILED in sample.reward_parts for each in answers for sample in each)
    )
