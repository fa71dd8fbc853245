"""All engines of a run as one: who gets requests, who is fed, who is waited for.

An engine is *admitted* (gets requests) while it answers and serves at least the version that this fleet was last told
to serve. Anything else quarantines it, until it proves the version again. Several processes feed the same engines (the
learner publishes, the collector heals); a lock file orders them and records the last version that was fed.

    generate   waits for an admitted engine; a failure quarantines and asks the next one
    load       lock → feed all engines at once → verify each → quarantine failures
    heal       lock → feed those that serve something else, unless another process has loaded a later version
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import EngineUnavailableError, EngineVersionError, RetryableError
from pipeline.ports import Sampling
from pipeline.records import Completion
from rollout_sglang.client import EngineClient
from rollout_sglang.locks import exclusive_lock
from rollout_sglang.protocol import UNKNOWN_ENGINE
from rollout_sglang.router import RouterClient

ATTEMPTS = 4
"""Failed answers that one `generate` takes before it gives up. Waiting for an engine to come back is not counted."""
_PROBE_PAUSE_S = 0.5
_FIRST_RETRY_PAUSE_S = 0.05
T = TypeVar("T")


@dataclass(frozen=True)
class _Target:
    """The version that every engine should serve, and where its weights lie."""

    version: int
    directory: Path


class Fleet:
    """Implements pipeline.ports.Engines over servers at `urls`; with `router_url`, requests go through SGLang's router.

    One process may use it from one event loop after another, but not from two at once.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        router_url: str | None,
        api_key: str | None,
        lock_path: Path,
        request_deadline_s: float,
        load_deadline_s: float,
    ) -> None:
        self._engines = [
            EngineClient(url, api_key, index=index, request_deadline_s=request_deadline_s)
            for index, url in enumerate(urls)
        ]
        self._router = RouterClient(router_url, api_key) if router_url else None
        self._entrance = (
            EngineClient(router_url, api_key, index=UNKNOWN_ENGINE, request_deadline_s=request_deadline_s)
            if router_url
            else None
        )
        self._lock_path = lock_path
        self._request_deadline_s = request_deadline_s
        self._load_deadline_s = load_deadline_s
        self._target: _Target | None = None
        self._quarantined: set[int] = set()
        self._in_flight = [0] * len(self._engines)
        self._router_is_suspect = False
        self._probe: asyncio.Task[None] | None = None

    async def generate(self, prompt: Sequence[int], num_samples: int, sampling: Sampling) -> list[Completion]:
        """Sample a group on one engine. Waits up to the request deadline while no engine is admitted.

        Raises EngineUnavailableError when none came back, or after `ATTEMPTS` failed answers.
        """
        ends = time.monotonic() + self._request_deadline_s
        failures: list[str] = []
        while len(failures) < ATTEMPTS:
            engine = await self._admitted_engine(ends)
            try:
                return await self._ask(engine, prompt, num_samples, sampling)
            except (EngineUnavailableError, EngineVersionError) as error:
                failures.append(str(error))
                await self._distrust(engine)
            await asyncio.sleep(_FIRST_RETRY_PAUSE_S * 2 ** len(failures))
        raise EngineUnavailableError(f"{ATTEMPTS} engines in a row failed one request; the last: {failures[-1]}")

    async def load(self, version: int, directory: Path) -> dict[str, float]:
        """Feed every engine. Returns the slowest engine's pause_s, load_s, verify_s, and lock_s.

        Engines that fail are quarantined. Raises EngineUnavailableError when none serves `version`.
        """
        started = time.monotonic()
        async with exclusive_lock(self._lock_path, self._load_deadline_s) as record:
            lock_s = time.monotonic() - started
            self._target = _Target(version, directory)
            _write_record(record, version)
            results = await _all(self._feed(engine, self._target) for engine in self._engines)
        seconds = [result for result in results if isinstance(result, dict)]
        if not seconds:
            raise EngineUnavailableError(
                f"no engine of {len(results)} took version {version}; "
                + "; ".join(result for result in results if isinstance(result, str))
            )
        return {name: max(times[name] for times in seconds) for name in seconds[0]} | {"lock_s": lock_s}

    async def heal(self, version: int, directory: Path) -> None:
        """Feed and admit the engines that answer but do not serve `version`; quarantine those that do not answer.

        When another process has meanwhile loaded another version, nothing is fed: the caller is behind.
        """
        self._target = _Target(version, directory)
        if not self._quarantined and await self._all_serve(version):
            return
        async with exclusive_lock(self._lock_path, self._load_deadline_s) as record:
            superseded = _read_record(record) not in (None, version)
            await _all(self._heal_one(engine, self._target, superseded) for engine in self._engines)

    async def versions(self) -> dict[str, int | None]:
        """URL → policy version that the engine serves; None where it does not answer or serves none of ours."""
        found = await _all(_version_of(engine) for engine in self._engines)
        return {engine.url: version for engine, version in zip(self._engines, found, strict=True)}

    async def prompt_logprobs(self, rows: Sequence[Sequence[int]]) -> dict[str, list[NDArray[np.float32]]]:
        """URL → prefill log-probabilities of `rows` (see EngineClient.prompt_logprobs), for every admitted engine."""
        engines = [engine for engine in self._engines if engine.index not in self._quarantined]
        scored = await _all(engine.prompt_logprobs(rows) for engine in engines)
        return {engine.url: arrays for engine, arrays in zip(engines, scored, strict=True)}

    async def close(self) -> None:
        """Release connections; engines and router go on."""
        if self._probe is not None and not self._probe.done():
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)
        clients = [*self._engines, self._entrance, self._router]
        await asyncio.gather(*(client.close() for client in clients if client is not None))

    async def _all_serve(self, version: int) -> bool:
        if any(served != version for served in (await self.versions()).values()):
            return False
        # Another process may have told the router to leave an engine out.
        return self._router is None or {engine.url for engine in self._engines} <= (await self._router.workers()).keys()

    async def _ask(
        self, engine: EngineClient, prompt: Sequence[int], num_samples: int, sampling: Sampling
    ) -> list[Completion]:
        oldest_allowed = self._target.version if self._target else None
        known = engine is not self._entrance
        if known:
            self._in_flight[engine.index] += 1
        try:
            completions = await engine.generate(prompt, num_samples, sampling)
        finally:
            if known:
                self._in_flight[engine.index] -= 1
        oldest = min((version for c in completions for version in c.versions), default=None)
        if oldest is not None and oldest_allowed is not None and oldest < oldest_allowed:
            raise EngineVersionError(
                f"{engine.url} sampled with version {oldest}, expected {oldest_allowed} or later: it was restarted "
                "unnoticed; its answer is thrown away"
            )
        return completions

    async def _admitted_engine(self, ends: float) -> EngineClient:
        """The least busy admitted engine (or the router). Raises EngineUnavailableError at time `ends`."""
        while True:
            engine = await self._admitted_now()
            if engine is not None:
                return engine
            if time.monotonic() > ends:
                raise EngineUnavailableError(
                    f"none of {len(self._engines)} engines came back within {self._request_deadline_s:g} s; "
                    "see logs/ of the run for why they died"
                )
            await asyncio.sleep(_PROBE_PAUSE_S)

    async def _admitted_now(self) -> EngineClient | None:
        if len(self._quarantined) == len(self._engines):
            await self._probe_quarantined()
        admitted = [engine for engine in self._engines if engine.index not in self._quarantined]
        if not admitted:
            return None
        if self._entrance is None or self._router is None:
            return min(admitted, key=lambda engine: self._in_flight[engine.index])
        # A router that is being restarted is waited for like an engine.
        self._router_is_suspect = self._router_is_suspect and not await self._router.ready()
        return None if self._router_is_suspect else self._entrance

    async def _distrust(self, engine: EngineClient) -> None:
        """Quarantine what failed. The router does not say which engine that was: then each one is asked."""
        if engine is not self._entrance:
            await self._quarantine(engine)
            return
        self._router_is_suspect = True
        found = await _all(_version_of(candidate) for candidate in self._engines)
        oldest_allowed = self._target.version if self._target else None
        for candidate, version in zip(self._engines, found, strict=True):
            if version is None or (oldest_allowed is not None and version < oldest_allowed):
                await self._quarantine(candidate)

    async def _probe_quarantined(self) -> None:
        """Give every quarantined engine a chance to come back; many callers share one probe."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._readmit())
        await asyncio.shield(self._probe)

    async def _readmit(self) -> None:
        if self._target is not None:
            await self.heal(self._target.version, self._target.directory)
            return
        for engine in [self._engines[index] for index in sorted(self._quarantined)]:
            if await _version_of(engine) is not None:
                await self._admit(engine)

    async def _heal_one(self, engine: EngineClient, target: _Target, superseded: bool) -> None:
        served = await _version_of(engine)
        if served == target.version:
            await self._admit(engine)
        elif not await engine.health():
            await self._quarantine(engine)
        elif not superseded:
            await self._feed(engine, target)
        elif served is not None and served > target.version:
            await self._admit(engine)
        else:
            await self._quarantine(engine)

    async def _feed(self, engine: EngineClient, target: _Target) -> dict[str, float] | str:
        """Seconds of the phases, or why the engine is quarantined now."""
        try:
            seconds = await engine.load_from_disk(target.version, target.directory, deadline_s=self._load_deadline_s)
            await self._admit(engine)
        except RetryableError as error:
            await self._quarantine(engine)
            return str(error)
        return seconds

    async def _quarantine(self, engine: EngineClient) -> None:
        self._quarantined.add(engine.index)
        if self._router is not None:
            await self._router.remove(engine.url)

    async def _admit(self, engine: EngineClient) -> None:
        if self._router is not None:
            await self._router.admit(engine.url)
        self._quarantined.discard(engine.index)


async def _all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all calls, once every one has ended; raises the first error."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


async def _version_of(engine: EngineClient) -> int | None:
    try:
        return await engine.version()
    except RetryableError:
        return None


def _write_record(descriptor: int, version: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"version": version}).encode(), 0)


def _read_record(descriptor: int) -> int | None:
    text = os.pread(descriptor, 4096, 0)
    return int(json.loads(text)["version"]) if text else None
