"""The collector against engines that misbehave: nothing lost, nothing trained twice, nothing stale committed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launch.compose import TaskPrompts
from pipeline.character_tokenizer import write_character_tokenizer
from pipeline.collector import Collector, CollectorSettings
from pipeline.errors import DeadlineExceededError, EngineUnavailableError
from pipeline.journal import Journal, read_events
from pipeline.ports import Sampling
from pipeline.recipe import SortDigitsTask
from pipeline.records import Completion, FinishReason, LogprobContract
from pipeline.rewards import Verifiers
from pipeline.rundir import RunDirectory
from pipeline.schedule import Schedule
from pipeline.store import BatchStore
from pipeline.tasks import PromptOrder, build_task
from pipeline.tokenizer import Tokenizer

PROMPTS, GROUP = 3, 2


@dataclass
class ScriptedEngines:
    """Answers every prompt with its sorted digits; `faults` are raised or answered first, one a call."""

    run: RunDirectory
    tokenizer: Tokenizer
    faults: list[Exception | FinishReason | int] = field(default_factory=list)
    healed: int = 0

    async def generate(self, prompt: Sequence[int], num_samples: int, sampling: Sampling) -> list[Completion]:
        await asyncio.sleep(0)
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, Exception):
            raise fault
        version = fault if isinstance(fault, int) else self.run.published_version()
        finish: FinishReason = fault if isinstance(fault, str) else "stop"
        digits = self.tokenizer.decode(prompt).removesuffix("=")
        tokens = (*self.tokenizer.encode("".join(sorted(digits))), self.tokenizer.eos_token_id)
        answer = Completion(
            tokens=tokens,
            logprobs=(-0.5,) * len(tokens),
            versions=(version,) * len(tokens),
            finish=finish,
            engine=0,
            queued_s=0.0,
            generated_s=0.0,
        )
        return [answer] * num_samples

    async def load(self, version: int, directory: Path) -> dict[str, float]:
        raise NotImplementedError

    async def heal(self, version: int, directory: Path) -> None:
        self.healed += 1

    async def close(self) -> None: ...


@pytest.fixture(scope="module")
def verifiers() -> object:
    task = build_task(SortDigitsTask(), seed=0)
    with Verifiers(task.reward, workers=1, deadline_s=30.0) as pool:
        yield pool


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    for folder in (run.batches, run.policies):
        folder.mkdir(parents=True)
    write_character_tokenizer(tmp_path / "model", "0123456789=")
    run.set_published(0)
    return run


def build(run: RunDirectory, verifiers: Verifiers, schedule: Schedule, **changes: object) -> Collector:
    tokenizer = Tokenizer.load(run.path.parent / "model")
    task = build_task(SortDigitsTask(), seed=0)
    sampling = Sampling(max_new_tokens=20)
    settings = dict(
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
    )
    return Collector(
        run=run,
        store=BatchStore(run.batches),
        schedule=schedule,
        engines=ScriptedEngines(run, tokenizer),
        prompts=TaskPrompts(task, tokenizer, PromptOrder(task.num_prompts, 0)),
        tokenizer=tokenizer,
        verifiers=verifiers,
        contract=LogprobContract(temperature=1.0, top_p=1.0, top_k=-1, scaled=True, tokenizer_sha256=tokenizer.sha256),
        journal=Journal(run.path),
        settings=CollectorSettings(**{**settings, **changes}),  # type: ignore[arg-type]
    )


async def learner(run: RunDirectory, schedule: Schedule) -> None:
    """Publishes version b + 1 once batch b is committed, as the real one does."""
    store = BatchStore(run.batches)
    for step in range(schedule.steps):
        while not store.exists(step):
            await asyncio.sleep(0.005)
        if schedule.publishes_after(step):
            run.set_published(step + 1)


def collect(collector: Collector) -> BatchStore:
    async def both() -> None:
        training = asyncio.create_task(learner(collector.run, collector.schedule))
        try:
            await collector.collect()
        finally:
            training.cancel()

    asyncio.run(both())
    return collector.store


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(kind="sync", steps=3),
        Schedule(kind="async", steps=5, lag=2),
        Schedule(kind="staged", steps=5, updates_per_stage=2),
    ],
    ids=lambda s: s.kind,
)
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
    evaluated = [event["version"] for event in read_events(run.path, "evaluated")]
    assert evaluated[-1] == schedule.steps
    assert len(evaluated) == len(set(evaluated))


def test_stale_aborted_and_refused_answers_are_sampled_again(run: RunDirectory, verifiers: Verifiers) -> None:
    run.set_published(1)
    collector = build(run, verifiers, Schedule(kind="sync", steps=2), evaluate_every=100)
    collector._evaluated.add(0)
    store = BatchStore(run.batches)
    store.commit(collect_one(run, verifiers))
    engines = collector.engines
    assert isinstance(engines, ScriptedEngines)
    engines.faults = [EngineUnavailableError("down"), 0, "abort", EngineUnavailableError("down")]
    collect(collector)
    batch = store.read(1, None)
    assert set(batch.policy_version.tolist()) == {1}
    assert "abort" not in {["stop", "length", "abort"][f] for f in batch.finish}
    assert engines.healed >= 4
    assert len(read_events(run.path, "retried")) == 4


def collect_one(run: RunDirectory, verifiers: Verifiers) -> object:
    """Batch 0 of the same run, made in a directory of its own."""
    other = RunDirectory(run.path.parent / "other")
    other.batches.mkdir(parents=True)
    other.policies.mkdir()
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


def test_a_prompt_that_cannot_fit_is_dropped_by_name(run: RunDirectory, verifiers: Verifiers) -> None:
    collector = build(run, verifiers, Schedule(kind="sync", steps=1), max_prompt_tokens=9, prompts_per_batch=8)
    batch = collect(collector).read(0, None)
    lengths = {g: len(collector.prompts.prompt(g).tokens) for g in range(8)}
    assert [d.group for d in batch.dropped] == [g for g, n in lengths.items() if n > 9] != []
    assert sorted(set(batch.group.tolist())) == [g for g, n in lengths.items() if n <= 9]
    assert "at most 9 fit" in batch.dropped[0].reason


def test_engines_that_never_answer_end_the_collector(run: RunDirectory, verifiers: Verifiers) -> None:
    collector = build(run, verifiers, Schedule(kind="sync", steps=1), wait_deadline_s=0.05, evaluate_every=100)
    engines = collector.engines
    assert isinstance(engines, ScriptedEngines)
    engines.faults = [EngineUnavailableError("down")] * 100_000
    with pytest.raises(DeadlineExceededError, match=r"not answered within .* down"):
        collect(collector)
    assert collector.store.committed() == []


def test_a_version_that_is_never_published_ends_the_collector(run: RunDirectory, verifiers: Verifiers) -> None:
    collector = build(run, verifiers, Schedule(kind="sync", steps=2), wait_deadline_s=0.2)
    with pytest.raises(DeadlineExceededError, match="version 1 was not published"):
        asyncio.run(collector.collect())
    assert collector.store.committed() == [0]
