"""The collector loop: prompts in, committed batches out.

    task ──prompts──▶ engines ──completions──▶ verifiers ──groups──▶ store.commit(batch)

    produce(batch)   consumes: nothing but the ledger (a dead collector starts again from the committed batches)
                     waits for: policy/PUBLISHED ≥ required_version(batch), then the batch before it to be committed
                     unblocked by: the learner's publish
    evaluate         runs between batches of a version that is due, and once after the last step

Up to `schedule.batches_in_flight` batches are under way at once; prompts are issued oldest batch first. A completion
that holds a token older than the schedule allows is thrown away and sampled again: nothing stale is ever committed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from pipeline.errors import DeadlineExceededError, EngineVersionError, RetryableError
from pipeline.evaluation import summarise
from pipeline.journal import Journal, read_events
from pipeline.ports import Engines, Sampling
from pipeline.records import Batch, Completion, DroppedGroup, Group, LogprobContract, Prompt, Sample
from pipeline.rewards import Verifiers
from pipeline.rundir import RunDirectory
from pipeline.schedule import Schedule
from pipeline.store import BatchStore
from pipeline.tokenizer import Tokenizer

Result = TypeVar("Result")


class PromptSource(Protocol):
    """Group i of the run, and the held-out prompts."""

    def prompt(self, group: int) -> Prompt: ...

    def held_out(self, count: int) -> Sequence[Prompt]: ...


@dataclass(frozen=True, kw_only=True)
class CollectorSettings:
    """The recipe's numbers that this loop reads."""

    prompts_per_batch: int
    group_size: int
    sampling: Sampling
    concurrent_prompts: int
    max_prompt_tokens: int
    evaluate_every: int
    evaluation_prompts: int
    evaluation_samples: int
    evaluation_sampling: Sampling
    wait_deadline_s: float
    """Longest wait for an answer or a publish; past it the collector ends (and the supervisor starts it again)."""
    recipe_sha256: str
    solved_reward: float = 1.0
    poll_s: float = 0.02
    retry_s: float = 0.2


@dataclass
class Collector:
    """See the module's head for the data flow."""

    run: RunDirectory
    store: BatchStore
    schedule: Schedule
    engines: Engines
    prompts: PromptSource
    tokenizer: Tokenizer
    verifiers: Verifiers
    contract: LogprobContract
    journal: Journal
    settings: CollectorSettings
    _slots: asyncio.Semaphore = field(init=False)
    _evaluated: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.settings.concurrent_prompts)
        self._evaluated = {event["version"] for event in read_events(self.run.path) if event["kind"] == "evaluated"}

    async def collect(self) -> None:
        """Commit every batch that the run still lacks, then evaluate the final policy."""
        await self._heal()
        index, cursor = self.store.next_index, self.store.next_group
        under_way: deque[asyncio.Task[None]] = deque()
        try:
            while index < self.schedule.steps or under_way:
                while index < self.schedule.steps and len(under_way) < self.schedule.batches_in_flight:
                    groups = range(cursor, cursor + self.settings.prompts_per_batch)
                    previous = under_way[-1] if under_way else None
                    under_way.append(asyncio.create_task(self._produce(index, groups, previous)))
                    index, cursor = index + 1, groups.stop
                await under_way[0]
                under_way.popleft()
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
        await self._evaluate(await self._wait_published(self.schedule.steps))

    async def _produce(self, index: int, groups: range, previous: asyncio.Task[None] | None) -> None:
        """Generate, score and commit one batch."""
        version = await self._wait_published(self.schedule.required_version(index))
        if index % self.settings.evaluate_every == 0:
            await self._evaluate(version)
        started = time.time()
        self.journal.event("issued", batch=index, first_group=groups.start, next_group=groups.stop, version=version)
        results = await gather_or_cancel([self._group(index, group) for group in groups])
        generated = time.time()
        if previous is not None:
            await asyncio.shield(previous)  # batches are committed in order, so the ledger never has a hole
        batch = Batch.from_groups(
            index,
            [result for result in results if isinstance(result, Group)],
            contract=self.contract,
            dropped=[result for result in results if isinstance(result, DroppedGroup)],
            next_group=groups.stop,
            recipe_sha256=self.settings.recipe_sha256,
        )
        ready = time.time()
        await asyncio.to_thread(self.store.commit, batch)
        self.journal.event(
            "committed",
            batch=index,
            samples=batch.num_samples,
            dropped=len(batch.dropped),
            started=started,
            seconds=dict(generate=generated - started, hold=ready - generated, commit=time.time() - ready),
        )

    async def _group(self, index: int, group: int) -> Group | DroppedGroup:
        prompt = self.prompts.prompt(group)
        if len(prompt.tokens) > self.settings.max_prompt_tokens:
            reason = f"prompt has {len(prompt.tokens)} tokens, at most {self.settings.max_prompt_tokens} fit"
            self.journal.event("dropped", batch=index, group=group, reason=reason)
            return DroppedGroup(group=group, reason=reason)
        completions = await self._sample(
            prompt,
            self.settings.group_size,
            self.settings.sampling,
            lambda version: self.schedule.allows(index, version),
        )
        return Group(prompt=prompt, samples=await self._score(prompt, completions))

    async def _sample(
        self, prompt: Prompt, wanted: int, sampling: Sampling, allowed: Callable[[int], bool]
    ) -> list[Completion]:
        """`wanted` completions whose every token has an allowed version; what is missing is sampled again until the
        deadline, so a dead engine or a policy that moved on costs time and nothing else."""
        deadline = time.monotonic() + self.settings.wait_deadline_s
        accepted: list[Completion] = []
        while len(accepted) < wanted:
            try:
                async with self._slots:
                    answers = await self.engines.generate(prompt.tokens, wanted - len(accepted), sampling)
                fresh = [a for a in answers if a.finish != "abort" and all(map(allowed, set(a.versions)))]
                accepted += fresh
                if len(fresh) < len(answers):
                    raise EngineVersionError(f"{len(answers) - len(fresh)} samples were aborted or of a stale version")
            except RetryableError as error:
                if time.monotonic() > deadline:
                    raise DeadlineExceededError(
                        f"group {prompt.group} was not answered within {self.settings.wait_deadline_s:.0f} s: {error}; "
                        "see logs/engine-*.log"
                    ) from error
                self.journal.event("retried", group=prompt.group, reason=str(error))
                await self._heal()
                await asyncio.sleep(self.settings.retry_s)
        return accepted

    async def _score(self, prompt: Prompt, completions: Sequence[Completion]) -> tuple[Sample, ...]:
        """Verify every completion; a failed verifier costs only its sample."""
        verdicts = await gather_or_cancel(
            [self.verifiers.score(prompt.text, self.tokenizer.decode(c.tokens), prompt.answer) for c in completions]
        )
        return tuple(
            Sample(completion=completion, reward=verdict.reward, reward_parts=verdict.parts)
            for completion, verdict in zip(completions, verdicts, strict=True)
        )

    async def _evaluate(self, version: int) -> None:
        """Held-out pass@k of a published version, once per version however often the collector is started."""
        if version in self._evaluated:
            return
        self._evaluated.add(version)  # at once: the batch after next may find the same version due
        started = time.time()
        held_out = self.prompts.held_out(self.settings.evaluation_prompts)
        samples = self.settings.evaluation_samples
        solved = await gather_or_cancel([self._solve(prompt, samples) for prompt in held_out])
        self.journal.event(
            "evaluated",
            version=version,
            prompts=len(held_out),
            samples=samples,
            seconds=time.time() - started,
            started=started,
            correct=solved,
            **summarise(solved, samples),
        )

    async def _solve(self, prompt: Prompt, samples: int) -> int:
        """How many of `samples` attempts at a held-out prompt are right."""
        answers = await self._sample(prompt, samples, self.settings.evaluation_sampling, lambda _version: True)
        return sum(sample.reward >= self.settings.solved_reward for sample in await self._score(prompt, answers))

    async def _wait_published(self, version: int) -> int:
        """Wait until the engines serve at least `version`; the learner publishes, or dies and is started again."""
        deadline = time.monotonic() + self.settings.wait_deadline_s
        while (published := self.run.published_version()) < version:
            if time.monotonic() > deadline:
                raise DeadlineExceededError(
                    f"version {version} was not published within {self.settings.wait_deadline_s:.0f} s "
                    f"(published: {published}); see logs/learner.log"
                )
            await asyncio.sleep(self.settings.poll_s)
        return published

    async def _heal(self) -> None:
        version = self.run.published_version()
        await self.engines.heal(version, self.run.policy_directory(version))


async def gather_or_cancel(work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """`asyncio.gather` that leaves nothing running behind when one of them fails or the caller is cancelled."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
