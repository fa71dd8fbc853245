"""`python -m tests.bench.in_flight`: the real collector on a virtual clock, over engines whose keys and values have
room for a part of `rollout.concurrent_prompts`. Print throughput and retractions with all those prompts at once, and
with as many as the engines' loads allow.

An engine makes a token of each running request in STEP_S and SAMPLE_S for each of them, and reads PREFILL_S a token. It
takes up requests as SGLang 0.5.23 does (PrefillAdder, NewTokenRatioTracker): while they fit with what those that run
are expected to need; when it is full, its youngest request is retracted, waits, and is read again.
    throughput    response tokens of committed batches a second, over those of engines with room for everything
    retractions   for each sample committed
    kv_use        mean share of keys and values in use
    queued        mean requests that wait within an engine, and can go to no other
    filled_s      seconds until an engine that came back has its share of prompts again
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.batch import Completion, Sampling
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import EngineUnavailableError
from pipeline.ports.affinity import Affinity
from pipeline.ports.load import EngineLoad
from pipeline.rollout.slots import Slots
from pipeline.schedule import Schedule
from tests.bench.composition import Verifiers
from tests.chaos.simulation.plan import Plan
from tests.chaos.simulation.world import World, run_loop
from tests.support.collecting import build, new_run

ENGINES, CEILING, GROUP, PROMPTS, STEPS, LAG = 2, 128, 4, 64, 24, 3
PROMPT, MEAN, LONGEST = 20, 200, 1000
"""Tokens: of a prompt, of an answer on average, at most."""
CLIP = 200
"""SGLang expects no request to need more; 4,096 of answers of 20,000 tokens."""
STEP_S, SAMPLE_S, PREFILL_S, CHUNK = 0.03, 0.0001, 0.0001, 8
NEEDED = 40_000
"""Mean live tokens of CEILING prompts under way, where all of them fit (measured)."""
DOWN = (120.0, 180.0)
"""When the last engine is away."""


@dataclass(eq=False)
class Request:
    length: int
    ended: asyncio.Future[None]
    made: int = 0
    retractions: int = 0

    @property
    def tokens(self) -> int:
        return PROMPT + self.made


@dataclass(eq=False)
class Engine:
    room: int
    queue: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    expected: float = 0.7
    """SGLang's new_token_ratio: what part of its longest answer a request is expected to need."""
    calls: int = 0
    seen: list[float] = field(default_factory=list)
    """Its KV use at each step."""
    queued: list[int] = field(default_factory=list)
    """Its queue then."""
    is_up: bool = True
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def live(self) -> int:
        return sum(request.tokens for request in self.running)

    def load(self) -> EngineLoad:
        use = self.live / self.room
        return EngineLoad(
            running=len(self.running), waiting=len(self.queue), live_tokens=self.live, kv_tokens=self.room, kv_use=use
        )

    async def run(self) -> None:
        while True:
            if not self.running and not self.queue:
                self.woken.clear()
                await self.woken.wait()
            read = 0
            left = sum(min(CLIP, LONGEST - request.made) for request in self.running)
            free = self.room - self.live - self.expected * left
            while self.queue and (most := self.queue[0].tokens + CLIP) < free:
                self.running.append(request := self.queue.popleft())
                read, free = read + request.tokens, free - most
            self.expected = max(0.14 * 0.7, self.expected - 0.86 * 0.7 / 600 * CHUNK)
            while self.live + CHUNK * len(self.running) > self.room:
                youngest = min(self.running, key=lambda request: request.made)
                self.running.remove(youngest)
                youngest.retractions += 1
                self.queue.append(youngest)
                made = sum(request.made for request in self.running) + 20 * len(self.running)
                self.expected = min(1.0, made / (1 + LONGEST * len(self.running)))
            self.seen.append(self.live / self.room)
            self.queued.append(len(self.queue))
            await asyncio.sleep(PREFILL_S * read + CHUNK * (STEP_S + SAMPLE_S * len(self.running)))
            for request in self.running:
                request.made = min(request.length, request.made + CHUNK)
                if request.made == request.length and not request.ended.done():
                    request.ended.set_result(None)
            self.running = [request for request in self.running if request.made < request.length]

    def lose_all(self) -> None:
        for request in [*self.running, *self.queue]:
            if not request.ended.done():
                request.ended.set_exception(EngineUnavailableError("it is away"))
        self.running.clear()
        self.queue.clear()


@dataclass
class Fleet:
    run: RunDirectory
    engines: list[Engine]
    seed: int
    slots: Slots | None = None
    """What is told the loads; None: nothing is."""
    retractions: int = 0

    async def generate(
        self, prompt: Sequence[int], num_samples: int, sampling: Sampling, affinity: Affinity | None = None
    ) -> list[Completion]:
        if sampling.max_new_tokens == 1:  # of the evaluation
            answer = Completion.given([3], [-0.5])
            return [replace(answer, versions=np.full(1, self.run.published_version(), np.int32))] * num_samples
        draw, loop = random.Random(f"{self.seed} {prompt}"), asyncio.get_running_loop()
        lengths = [min(LONGEST, 1 + int(draw.expovariate(1 / MEAN))) for _ in range(num_samples)]
        while True:
            engine = min((one for one in self.engines if one.is_up), key=lambda one: one.calls)
            version, engine.calls = self.run.published_version(), engine.calls + 1
            requests = [Request(length, loop.create_future()) for length in lengths]
            engine.queue.extend(requests)
            engine.woken.set()
            try:
                await asyncio.gather(*(request.ended for request in requests))
                break
            except EngineUnavailableError:
                if self.slots is not None and self.slots.is_overdrawn:
                    raise
            finally:
                engine.calls -= 1
        self.retractions += sum(request.retractions for request in requests)
        answers = [Completion.given([3] * length, [-0.5] * length) for length in lengths]
        return [
            replace(answer, versions=np.full(request.length, version, np.int32), retractions=request.retractions)
            for answer, request in zip(answers, requests, strict=True)
        ]

    async def resync(self, version: int, directory: Path) -> None: ...

    def tell(self) -> None:
        if self.slots is not None:
            self.slots.observe([engine.load() for engine in self.engines if engine.is_up])

    async def look(self) -> None:
        while True:
            self.tell()
            await asyncio.sleep(1.0)

    async def interrupt(self, of: Slots) -> float:
        """Take the last engine away for a while. Return the seconds after which it has nine tenths of its share."""
        await asyncio.sleep(DOWN[0])
        engine = self.engines[-1]
        engine.is_up = False
        self.tell()
        engine.lose_all()
        await asyncio.sleep(DOWN[1] - DOWN[0])
        engine.is_up = True
        self.tell()
        began = asyncio.get_running_loop().time()
        while engine.calls < 0.9 * of.number / ENGINES:
            await asyncio.sleep(0.05)
        return asyncio.get_running_loop().time() - began


@dataclass(frozen=True)
class Seen:
    throughput: float
    retractions: float
    kv_use: float
    queued: float
    filled_s: float
    slots: int


def play(room: float, *, follows: bool, seed: int, dies: bool = False) -> Seen:
    """Collect STEPS batches on a virtual clock, over engines with `room` of what CEILING prompts need."""
    world, filled_s = World(Plan(seed=seed)), list[float]()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        run = new_run(Path(folder))
        collector = build(
            run,
            Verifiers(),  # type: ignore[arg-type]
            Schedule(kind="async", steps=STEPS, lag=LAG),
            prompts_per_batch=PROMPTS,
            group_size=GROUP,
            sampling=Sampling(max_new_tokens=LONGEST),
            concurrent_prompts=CEILING,
            engines=ENGINES,
            max_prompt_tokens=PROMPT,
            evaluate_every=1000,
            evaluation_prompts=1,
            evaluation_sampling=Sampling(max_new_tokens=1),
            poll_s=2.0,
            window=0.3 * PROMPTS,
            wait_deadline_s=1e9,
        )
        fleet = Fleet(run, [Engine(int(room * NEEDED / ENGINES)) for _ in range(ENGINES)], seed)
        fleet.slots = collector.slots if follows else None
        collector._sampler.__dict__["engines"] = fleet
        collector.engines = fleet  # type: ignore[assignment]

        async def learn() -> None:
            for step in range(STEPS):
                while step not in collector.store.committed():
                    await asyncio.sleep(1.0)
                run.set_published(step + 1)

        async def all_of_it() -> None:
            beside: list[asyncio.Task[Any]] = [asyncio.create_task(engine.run()) for engine in fleet.engines]
            beside += [asyncio.create_task(fleet.look()), asyncio.create_task(learn())]
            away = asyncio.create_task(fleet.interrupt(collector.slots)) if dies else None
            await collector.collect()
            filled_s.extend([await away] if away is not None else ())
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

        world.run(lambda _: run_loop(world, all_of_it()) or 0)
        assert world.problems == []
        ended = world.now
        batches = [collector.store.read(index, None) for index in collector.store.committed()]
    samples = sum(batch.num_samples for batch in batches)
    return Seen(
        throughput=sum(int(batch.response_lengths.sum()) for batch in batches) / ended,
        retractions=fleet.retractions / samples,
        kv_use=float(np.mean([use for engine in fleet.engines for use in engine.seen])),
        queued=float(np.mean([queued for engine in fleet.engines for queued in engine.queued])),
        filled_s=max(filled_s, default=0.0),
        slots=collector.slots.number,
    )


def main(seeds: int = 4) -> None:
    whole = np.mean([play(4.0, follows=False, seed=seed).throughput for seed in range(seeds)])
    for room in (0.3, 0.6, 1.0, 4.0):
        for follows in (False, True):
            seen = [play(room, follows=follows, seed=seed) for seed in range(seeds)]
            back = [play(room, follows=follows, seed=seed, dies=True).filled_s for seed in range(seeds)]
            figures = dict(
                throughput=np.mean([one.throughput for one in seen]) / whole,
                retractions=np.mean([one.retractions for one in seen]),
                kv_use=np.mean([one.kv_use for one in seen]),
                queued=np.mean([one.queued for one in seen]),
                slots=np.mean([one.slots for one in seen]),
                filled_s=max(back),
            )
            row = dict(room=room, prompts="as the engines tell" if follows else "all at once")
            print(json.dumps(row | {key: round(float(value), 3) for key, value in figures.items()}), flush=True)


if __name__ == "__main__":
    main()
