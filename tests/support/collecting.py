"""The collector with engines and a learner that only pretend: they answer wrongly, die and fall behind on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from launch.build.components import TaskPrompts
from pipeline.config.task_sections import SortDigitsTask
from pipeline.data.batch import Batch, Completion, FinishReason, LogprobContract, Sampling
from pipeline.data.event_log import EventLog
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.ports.affinity import Affinity
from pipeline.rewards.pool import Verifiers
from pipeline.rollout.collector import Collector, CollectorSettings
from pipeline.schedule import Schedule
from pipeline.tasks import Task, build_task
from pipeline.tasks.mixture import order_of
from pipeline.tasks.tokenizer import Tokenizer, write_character_tokenizer

PROMPTS, GROUP = 3, 2


def new_run(folder: Path) -> RunDirectory:
    """An empty run that serves version 0, with a tokenizer of digits and `=` beside it."""
    run = RunDirectory(folder / "run")
    run.make_folders()
    write_character_tokenizer(folder / "model", "0123456789=")
    run.set_published(0)
    return run


@dataclass
class PretendEngines:
    """Answers each prompt with its sorted digits, wrong where `solves` says no; `faults` come first, one a call.

    The first half of an answer has the version that was published when it was asked, the second half the one that is
    published when it is done.
    """

    run: RunDirectory
    tokenizer: Tokenizer
    faults: list[Exception | FinishReason | int] = field(default_factory=list)
    solves: Callable[[str, int], bool] = lambda _digits, _member: True
    """(digits of the prompt, place in the request) → whether the answer is right."""
    latency_s: Callable[[str], float] = lambda _digits: 0.0
    answers_from: Callable[[str], int] = lambda _digits: 0
    """(digits of the prompt) → the version that must be published before the answer is done."""
    resyncs: int = 0
    asked: list[str] = field(default_factory=list)
    """Digits of every request, in order."""
    in_flight: int = 0
    most_in_flight: int = 0

    async def generate(
        self, prompt: Sequence[int], num_samples: int, sampling: Sampling, affinity: Affinity | None = None
    ) -> list[Completion]:
        digits = self.tokenizer.decode(prompt).removesuffix("=")
        self.asked.append(digits)
        before = self.run.published_version()
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.latency_s(digits))
            async with asyncio.timeout(20.0):
                while self.run.published_version() < self.answers_from(digits):
                    await asyncio.sleep(0.005)
        finally:
            self.in_flight -= 1
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, Exception):
            raise fault
        after = self.run.published_version()
        if isinstance(fault, int):
            before = after = fault
        finish: FinishReason = fault if isinstance(fault, str) else "stop"
        return [self._answer(digits, member, before, after, finish) for member in range(num_samples)]

    def _answer(self, digits: str, member: int, before: int, after: int, finish: FinishReason) -> Completion:
        right = "".join(sorted(digits))
        text = right if self.solves(digits, member) else right[::-1] + "="
        tokens = (*self.tokenizer.encode(text), self.tokenizer.eos_token_id)
        first = len(tokens) // 2
        versions = np.array([before] * first + [after] * (len(tokens) - first), np.int32)
        completion = Completion.given(tokens, (-0.5,) * len(tokens))
        return replace(completion, versions=versions, finish=finish)

    async def load(self, version: int, directory: Path, check: object = None) -> dict[str, float]:
        raise NotImplementedError

    async def resync(self, version: int, directory: Path) -> None:
        self.resyncs += 1

    async def close(self) -> None: ...


def build(
    run: RunDirectory,
    verifiers: Verifiers,
    schedule: Schedule,
    *,
    num_prompts: int = 100_000,
    given: Task | None = None,
    **changes: Any,
) -> Collector:
    """A collector of sort_digits, or of another task that is given; `changes` are CollectorSettings."""
    tokenizer = Tokenizer.load(run.path.parent / "model")
    task = given or build_task(SortDigitsTask(num_prompts=num_prompts), seed=0)
    sampling = Sampling(max_new_tokens=20)
    settings: dict[str, Any] = dict(
        prompts_per_batch=PROMPTS,
        group_size=GROUP,
        sampling=sampling,
        concurrent_prompts=8,
        max_prompt_tokens=20,
        evaluate_every=2,
        evaluation_prompts=2,
        evaluation_samples=2,
        evaluation_sampling=sampling,
        wait_deadline_s=20.0,
        recipe_sha256="r",
        retry_s=0.0,
        poll_s=0.02,
    )
    return Collector(
        run=run,
        store=BatchStore(run.batches, run.fence),
        schedule=schedule,
        engines=PretendEngines(run, tokenizer),
        prompts=TaskPrompts(task, tokenizer, order_of(task, 0)),
        tokenizer=tokenizer,
        verifiers={task.reward: verifiers},
        contract=LogprobContract(temperature=1.0, top_p=1.0, top_k=-1, tokenizer_sha256=tokenizer.sha256),
        event_log=EventLog(run.path, "collector-000001"),
        settings=CollectorSettings(**{**settings, **changes}),
    )


def engines_of(collector: Collector) -> PretendEngines:
    """The pretended engines of a collector that `build` made."""
    assert isinstance(collector.engines, PretendEngines)
    return collector.engines


async def learner(run: RunDirectory, schedule: Schedule, seconds_per_step: float = 0.0) -> None:
    """Publishes version b + 1 once batch b is committed, as the real one does."""
    store = BatchStore(run.batches)
    for step in range(schedule.steps):
        while step not in store.settled():
            await asyncio.sleep(0.005)
        await asyncio.sleep(seconds_per_step)
        if schedule.publishes_after(step) and step + 1 > run.published_version():
            run.set_published(step + 1)


def collect(collector: Collector, *, killed_after_s: float | None = None, seconds_per_step: float = 0.0) -> BatchStore:
    """Run it beside a learner, to its end or to a sudden one."""

    async def both() -> None:
        training = asyncio.create_task(learner(collector.run, collector.schedule, seconds_per_step))
        try:
            async with asyncio.timeout(killed_after_s):
                await collector.collect()
        except TimeoutError:
            if killed_after_s is None:
                raise
        finally:
            training.cancel()

    asyncio.run(both())
    return collector.store


def batches(store: BatchStore) -> list[Batch]:
    """All that is committed."""
    return [store.read(index, None) for index in store.committed()]
