"""Engines that are no part of the machine that fails: they die, err and fall behind, as often as the plan says.

A process sees them through a fleet of its own, which follows rollout_sglang.fleet in what matters here: updates have
numbers (the real lease) and engines refuse lower ones; answers older than the version that a fleet was told are thrown
away; an engine that came back is given the published version, unless a later one was given meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.data.batch import Completion, FinishReason, Sampling
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import EngineUnavailableError, EngineVersionError, RetryableError
from pipeline.ports.affinity import Affinity
from pipeline.ports.weights import WeightCheck
from pipeline.rewards.pool import Verdict
from pipeline.rollout.group_sampler import gather_or_cancel
from rollout_sglang.weights.update_lease import UpdateKind, Updates
from tests.chaos.simulation.world import World

VOCABULARY = 50
REQUEST_DEADLINE_S = 20.0
LOAD_DEADLINE_S = 30.0
SOLVES = 7
"""The token that a right answer begins with."""
HELD_OUT = (20, 2)
"""The held-out prompt."""


@dataclass
class Engine:
    """What an engine holds."""

    version: int | None = None
    number: int = 0
    """Of the newest weight update that it has seen."""
    back_at: float = -1.0
    """It is down until then."""

    def is_up(self, now: float) -> bool:
        return now >= self.back_at


class EngineRoom:
    """All engines of a simulation."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.engines = [Engine() for _ in range(world.plan.engines)]
        self.draw = world.random("engines")
        self._next_death = self._drawn_death()

    def up(self) -> list[Engine]:
        """Those that answer now."""
        now = self.world.now
        while now >= self._next_death:
            engine = self.draw.choice(self.engines)
            engine.version, engine.back_at = None, self._next_death + self.draw.uniform(1.0, 40.0)
            self.world.note("engines", "DIES", str(self.engines.index(engine)))
            self._next_death = self._drawn_death()
        return [engine for engine in self.engines if engine.is_up(now)]

    def lose_all(self) -> None:
        """The machine has no power for a moment."""
        for engine in self.engines:
            engine.version, engine.number, engine.back_at = None, 0, self.world.now + 5.0

    def _drawn_death(self) -> float:
        rate = self.world.plan.engine_deaths / 1_000
        return self.world.now + self.draw.expovariate(rate) if rate else float("inf")


class SimulatedFleet:
    """Stand for the fleet in one process."""

    def __init__(self, room: EngineRoom, run: RunDirectory, updates: Updates) -> None:
        self._room = room
        self._world = room.world
        self._run = run
        self._updates = updates
        self._target: int | None = None
        self._resync: asyncio.Task[None] | None = None
        self._draw = room.world.random(f"fleet {room.world.me().name}")

    async def generate(
        self, prompt: Sequence[int], num_samples: int, sampling: Sampling, affinity: Affinity | None = None
    ) -> list[Completion]:
        engine = await self._admitted(time.monotonic() + REQUEST_DEADLINE_S)
        plan, first = self._world.plan, engine.version
        assert first is not None
        await asyncio.sleep(self._draw.expovariate(6.0))
        if plan.evaluation_s and tuple(prompt[:2]) == HELD_OUT:
            await asyncio.sleep(self._draw.uniform(0.0, plan.evaluation_s))
        if self._draw.random() < plan.engine_errors:
            if self._draw.random() < 0.2:
                await asyncio.sleep(REQUEST_DEADLINE_S)
            raise EngineUnavailableError("simulated: the engine failed")
        last = engine.version
        if engine not in self._room.up() or last is None:
            raise EngineUnavailableError("simulated: the engine died")
        if self._draw.random() < plan.engine_stale:
            first = last = max(0, first - self._draw.randint(1, 3))
        if self._target is not None and min(first, last) < self._target:
            raise EngineVersionError("simulated: an answer of an older version")
        return [self._answer(engine, prompt, sampling, first, last) for _ in range(num_samples)]

    async def load(self, version: int, directory: Path, check: WeightCheck | None = None) -> dict[str, float]:
        async with self._updates.take("publish", LOAD_DEADLINE_S) as update:
            self._target = version
            ends = time.monotonic() + LOAD_DEADLINE_S
            while not self._room.up():
                if time.monotonic() > ends:
                    raise EngineUnavailableError("simulated: no engine answers")
                await asyncio.sleep(0.2)
            taken = [await self._give(engine, version, directory, update.number) for engine in self._room.up()]
            if not any(taken):
                raise EngineUnavailableError("simulated: no engine took the version")
            update.given = version
        return {"load_s": 0.25}

    async def resync(self, version: int, directory: Path) -> None:
        self._target = version
        if self._resync is None or self._resync.done():
            self._resync = asyncio.create_task(self._bring_back(version, directory))
        await asyncio.shield(self._resync)

    async def close(self) -> None: ...

    async def _admitted(self, ends: float) -> Engine:
        while True:
            admitted = [
                engine
                for engine in self._room.up()
                if engine.version is not None and (self._target is None or engine.version >= self._target)
            ]
            if admitted:
                return self._draw.choice(admitted)
            if time.monotonic() > ends:
                raise EngineUnavailableError("simulated: no engine came back")
            with suppress(RetryableError):
                version = self._run.published_version()
                await self.resync(version, self._run.policy_directory(version))
            await asyncio.sleep(0.2)

    async def _bring_back(self, version: int, directory: Path) -> None:
        behind = [engine for engine in self._room.up() if engine.version is None or engine.version < version]
        if not behind:
            return
        kind: UpdateKind = "resync_single" if len(behind) < len(self._room.up()) else "resync"
        async with self._updates.take(kind, LOAD_DEADLINE_S) as update:
            if update.given is None or update.given <= version:
                for engine in behind:
                    await self._give(engine, version, directory, update.number)

    async def _give(self, engine: Engine, version: int, directory: Path, number: int) -> bool:
        """Whether the engine holds the version afterwards."""
        if number < engine.number:
            return False
        engine.number, engine.version = number, None
        await asyncio.sleep(self._draw.expovariate(8.0))
        failed = self._draw.random() < self._world.plan.publish_errors
        if failed or engine.number != number or engine not in self._room.up() or not directory.is_dir():
            return False
        engine.version = version
        return True

    def _answer(self, engine: Engine, prompt: Sequence[int], sampling: Sampling, first: int, last: int) -> Completion:
        draw = self._draw
        length = draw.randint(1, 6)
        finish: FinishReason = "length" if length >= sampling.max_new_tokens else "stop"
        length = min(length, sampling.max_new_tokens)
        if draw.random() < self._world.plan.engine_stale / 3:
            finish = "abort"
        right = draw.random() < prompt[0] / VOCABULARY + 0.05 * last
        tokens = (SOLVES if right else SOLVES + 1, *(draw.randrange(VOCABULARY) for _ in range(length - 1)))
        early = length if first == last else draw.randint(0, length)
        return Completion(
            tokens=np.array(tokens, np.int32),
            logprobs=np.array([-draw.random() for _ in tokens], np.float32),
            versions=np.array([first] * early + [last] * (length - early), np.int32),
            loss_mask=np.ones(length, np.bool_),
            finish=finish,
            engine=self._room.engines.index(engine),
            queued_s=0.0,
            generated_s=0.5,
        )


class SimulatedVerifiers:
    """Stands for pipeline.rewards.pool.Verifiers."""

    def __init__(self, world: World) -> None:
        self._draw = world.random(f"verifiers {world.me().name}")

    async def score_group(
        self, prompt: str, answer: str, metadata: Mapping[str, object], responses: Sequence[str], info: object
    ) -> list[Verdict]:
        verdicts = await gather_or_cancel([self._score(response) for response in responses])
        if all(verdict.failed for verdict in verdicts):  # of a batch that no verifier can judge, a run ends
            verdicts[0] = _judged(responses[0])
        return verdicts

    async def _score(self, response: str) -> Verdict:
        await asyncio.sleep(self._draw.expovariate(20.0))
        if self._draw.random() < 0.01:
            return Verdict(reward=0.0, parts={"verifier_failed": 1.0}, failed="timeout")
        return _judged(response)


def _judged(response: str) -> Verdict:
    return Verdict(reward=float(response.split()[:1] == [str(SOLVES)]))
