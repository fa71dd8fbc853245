"""The samples of one prompt, whatever the engines do meanwhile.

slots ──priority──▶ engines ──answers──▶ is every token of an allowed version? ──no──▶ resync, ask for what is missing
                   ▲                                                                             │
                   └─────────────────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from pipeline.beside_loop import beside_loop
from pipeline.data.batch import Completion, Prompt
from pipeline.data.event_log import EventLog
from pipeline.errors import DeadlineExceededError, EngineVersionError, RetryableError
from pipeline.patience import Patience, retry_pause_s
from pipeline.ports.engines import Engines, Sampling
from pipeline.rollout.interruption import Interruption
from pipeline.rollout.priority_semaphore import Priority, PrioritySemaphore, gather_or_cancel


@dataclass(frozen=True, kw_only=True)
class GroupSampler:
    """Asks the engines for as many prompts at once as there are slots."""

    engines: Engines
    slots: PrioritySemaphore
    resync: Callable[[], Awaitable[None]]
    """Called after a failure, before the prompt is asked again."""
    event_log: EventLog
    interruption: Interruption | None
    deadline_s: float
    """Longest time, in seconds, in which no sample of a prompt comes."""
    retry_s: float
    """Pause after a prompt's first failure; it doubles with each one in a row."""
    patience: Patience
    """Of all prompts together: a sample of any of them is progress."""

    async def sample(
        self, prompt: Prompt, wanted: int, sampling: Sampling, *, priority: Priority, allowed: Callable[[int], bool]
    ) -> list[Completion]:
        """`wanted` completions whose every token has an allowed version; several versions in one are welcome.

        What is missing is sampled again, so a dead engine or a policy that moved on costs time and nothing else. Raises
        DeadlineExceededError when no sample has come for `deadline_s`.
        """
        accepted: dict[int, Completion] = {}
        give_up: float | None = None
        failures = 0
        while missing := [member for member in range(wanted) if member not in accepted]:
            async with self.slots.acquire(priority):
                answers = await self._ask(prompt, missing, sampling)
            fresh = {m: a for m, a in zip(missing, answers, strict=True) if _is_fresh(a, allowed)}
            accepted |= {member: answer for member, answer in fresh.items() if isinstance(answer, Completion)}
            if fresh:
                self.patience.progress()
            if len(fresh) == len(missing):
                break
            if fresh or give_up is None:  # the clock starts at a failure: waiting for a slot may take hours
                give_up = time.monotonic() + self.deadline_s
                failures = 0
            failures += 1
            await self._recover(prompt, answers, give_up, retry_pause_s(self.retry_s, failures))
        return [accepted[member] for member in range(wanted)]

    async def _ask(
        self, prompt: Prompt, members: Sequence[int], sampling: Sampling
    ) -> Sequence[Completion | RetryableError]:
        """For each sample that is asked for, its completion or why there is none."""
        if self.interruption is not None:
            cuts = [(member, self.interruption) for member in members]
            return await gather_or_cancel([self._interrupted(prompt, *cut, sampling) for cut in cuts])
        try:
            return await self.engines.generate(prompt.tokens, len(members), sampling)
        except RetryableError as error:
            return [error] * len(members)

    async def _interrupted(
        self, prompt: Prompt, member: int, interruption: Interruption, sampling: Sampling
    ) -> Completion | RetryableError:
        """One sample: up to its cut and, when it has not ended there, from the phrase to its end."""
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
        return await beside_loop(interruption.join, thought, answer)

    async def _recover(
        self, prompt: Prompt, answers: Sequence[Completion | RetryableError], give_up: float, pause_s: float
    ) -> None:
        """Log what went wrong, resync the engines, and pause. Raises DeadlineExceededError past `give_up`."""
        refused = EngineVersionError("samples were aborted or of a stale version")
        error = next((answer for answer in answers if isinstance(answer, RetryableError)), refused)
        if time.monotonic() > give_up:
            raise DeadlineExceededError(
                f"group {prompt.group} was not answered within {self.deadline_s:.0f} s: {error}; see logs/engine-*.log"
            ) from error
        self.event_log.event("retried", group=prompt.group, reason=str(error))
        self.patience.still(f"samples, such as those of group {prompt.group}: {error}")
        await self.resync()
        await asyncio.sleep(pause_s)


def _is_fresh(answer: Completion | RetryableError, allowed: Callable[[int], bool]) -> bool:
    return isinstance(answer, Completion) and answer.finish != "abort" and all(map(allowed, answer.distinct_versions))
