"""`python -m tests.bench.composition`: the real collector on a virtual clock, with one answer in twenty that is thirty
times as long. For each composition of batches, print the throughput of engines beside that without long answers.

Engines have SLOTS slots; a slot makes a token a second. The learner takes LEARNER of the time in which engines make a
batch.
    throughput   the share of the slots' time in which they made tokens, over that without long answers
    lengths      the mean length of answers in the first half of the batches, over that of as many answers as were asked
    p            the least of SEEDS values of Kolmogorov's and Smirnov's test on the same two
    alarms       the share of seeds with an alarm of the run's own watch (pipeline.rollout.bias)
Then, without long answers, what evaluations cost that take the engines as long as a batch, every EVERY steps:
    learner_idle without and with them, and how much longer a step is, for learners as slow as `learner` says
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from pipeline.data.batch import Completion, Sampling
from pipeline.data.run_directory import RunDirectory
from pipeline.ports.affinity import Affinity
from pipeline.rewards.pool import Verdict
from pipeline.schedule import Schedule
from pipeline.trainer.batches import describe
from precision.mismatch.alarms import alarms
from tests.chaos.simulation.plan import Plan
from tests.chaos.simulation.world import World, run_loop
from tests.support.collecting import build, new_run

PROMPTS, SLOTS, STEPS, LAG = 16, 4, 60, 4
LONG_SHARE, TIMES_AS_LONG, LEARNER, SEEDS = 0.05, 30, 0.8, 20
EVERY, NEVER, FEW = 10, 1000, 3


@dataclass
class Fleet:
    """Engines that answer with as many tokens as a draw of the prompt says."""

    run: RunDirectory
    long_share: float
    seed: int
    slots: int
    evaluation_s: float
    spans: list[tuple[float, int]] = field(default_factory=list)
    """When each answer was begun, and its length."""

    @property
    def busy(self) -> float:
        """The share of the slots' time in which they made tokens, until the last answer was begun."""
        end = max(begun for begun, _ in self.spans)
        return sum(min(length, end - begun) for begun, length in self.spans) / (self.slots * end)

    async def generate(
        self, prompt: Sequence[int], num_samples: int, sampling: Sampling, affinity: Affinity | None = None
    ) -> list[Completion]:
        if sampling.max_new_tokens == 1:  # of the evaluation
            if self.evaluation_s:
                await asyncio.sleep(self.evaluation_s)
            answer = Completion.given([3], [-0.5])
            return [replace(answer, versions=np.full(1, self.run.published_version(), np.int32))] * num_samples
        draw = random.Random(f"{self.seed} {prompt}")
        length = 20 * TIMES_AS_LONG if draw.random() < self.long_share else draw.randint(10, 30)
        self.spans.append((asyncio.get_running_loop().time(), length))
        version = self.run.published_version()
        await asyncio.sleep(length)
        answer = Completion.given([3] * length, [-0.5] * length)
        return [replace(answer, versions=np.full(length, version, np.int32))] * num_samples

    async def resync(self, version: int, directory: Path) -> None: ...


class Verifiers:
    async def score_group(self, prompt: str, answer: str, metadata: object, responses: list[str], info: Any) -> Any:
        return [Verdict(reward=1.0)] * len(responses)


@dataclass(frozen=True)
class Seen:
    busy: float
    learner_idle: float
    """Share of the time after the first batch in which the learner waited."""
    seconds: float
    """From the first batch to the last step."""
    p_value: float
    length_ratio: float
    discarded: int
    lag: float
    """Mean, in versions."""
    alarms: tuple[tuple[int, str], ...]
    """(step, name)."""


def play(
    window: float,
    lag: int,
    long_share: float,
    seed: int,
    *,
    prompts: int = PROMPTS,
    slots: int = SLOTS,
    steps: int = STEPS,
    learner: float = LEARNER,
    every: int = NEVER,
) -> Seen:
    """Collect `steps` batches on a virtual clock. Where evaluations take time, version 0 is evaluated already."""
    world = World(Plan(seed=seed))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        run = new_run(Path(folder))
        schedule = Schedule(kind="async", steps=steps, lag=lag)
        collector = build(
            run,
            Verifiers(),  # type: ignore[arg-type]
            schedule,
            prompts_per_batch=prompts,
            group_size=1,
            concurrent_prompts=slots,
            max_prompt_tokens=1000,
            evaluate_every=every,
            evaluation_prompts=1 if every == NEVER else prompts,
            evaluation_sampling=Sampling(max_new_tokens=1),
            poll_s=2.0,
            window=window,
            wait_deadline_s=1e9,
        )
        fleet = Fleet(run, long_share, seed, slots, evaluation_s=0.0 if every == NEVER else 20.0)
        collector = replace(collector, engines=fleet)  # type: ignore[arg-type]
        collector._evaluated |= set() if every == NEVER else {0}
        mean = 20 * (1 + long_share * (TIMES_AS_LONG - 1))
        step_s, trained_s, ended = learner * mean * prompts / slots, [0.0], [0.0, 0.0]

        async def learn() -> None:
            for step in range(steps):
                while step not in collector.store.committed():
                    await asyncio.sleep(2.0)
                ended[0] = ended[0] or world.now
                await asyncio.sleep(step_s)
                trained_s[0] += step_s
                run.set_published(step + 1)
            ended[1] = world.now

        async def both() -> None:
            learning = asyncio.create_task(learn())
            await collector.collect()
            await learning

        world.run(lambda _: run_loop(world, both()) or 0)
        assert world.problems == []
        batches = [collector.store.read(index, None) for index in collector.store.committed()]
    trained = [length for batch in batches for length in batch.response_lengths.tolist()]
    half = [length for batch in batches[: steps // 2] for length in batch.response_lengths.tolist()]
    asked = [length for _, length in fleet.spans]
    lags = np.concatenate([batch.index - batch.policy_version for batch in batches])
    assert lags.max() <= lag
    return Seen(
        busy=fleet.busy,
        learner_idle=1.0 - trained_s[0] / (ended[1] - ended[0]),
        seconds=ended[1] - ended[0],
        p_value=float(stats.ks_2samp(half, asked[: len(half)], method="asymp").pvalue),
        length_ratio=float(np.mean(half) / np.mean(asked[: len(half)])),
        discarded=len(asked) - len(trained),
        lag=float(lags.mean()),
        alarms=tuple(
            (batch.index, alarm.rule.name) for batch in batches for alarm in alarms(describe(batch, 0), quantized=False)
        ),
    )


def main() -> None:
    plain = np.mean([play(0.0, LAG, 0.0, seed).busy for seed in range(SEEDS)])
    for name, window in (("fifo", 0.0), ("window", 0.3), ("ready", math.inf)):
        seen = [play(window * PROMPTS, LAG, LONG_SHARE, seed) for seed in range(SEEDS)]
        figures = dict(
            throughput=np.mean([one.busy for one in seen]) / plain,
            learner_idle=np.mean([one.learner_idle for one in seen]),
            mean_lag=np.mean([one.lag for one in seen]),
            lengths=np.mean([one.length_ratio for one in seen]),
            p=min(one.p_value for one in seen),
            discarded=sum(one.discarded for one in seen),
            alarms=np.mean([bool(one.alarms) for one in seen]),
        )
        print(json.dumps(dict(composition=name) | {key: round(float(value), 3) for key, value in figures.items()}))
    for lag, learner in product((1, LAG), (LEARNER, 1.0, 1 / LEARNER)):
        without, beside = (
            [play(0.0, lag, 0.0, seed, learner=learner, every=every) for seed in range(FEW)] for every in (NEVER, EVERY)
        )
        figures = dict(
            without=np.mean([one.learner_idle for one in without]),
            learner_idle=np.mean([one.learner_idle for one in beside]),
            longer=np.mean([one.seconds for one in beside]) / np.mean([one.seconds for one in without]) - 1.0,
        )
        told = dict(lag=lag, learner=learner) | {key: round(float(value), 3) for key, value in figures.items()}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
