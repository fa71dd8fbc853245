"""All engines of a run as one: which of them get requests, which are given weights, which are waited for.

An engine is *admitted* (gets requests) while it answers and serves at least the version that this fleet was last told
to serve. Otherwise it is quarantined until it is verified again. Two processes give weights to the same engines: the
learner publishes, the collector resyncs. A lock file keeps them apart and holds the version that was given last.

    generate   waits for an admitted engine; an engine that fails is quarantined and the next one asked
    load       lock → all engines take the weights at once → each is verified → those that fail twice are quarantined
    resync     lock → engines that claim the version are verified, the others are given its weights, unless another
               process has loaded a later version
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from pipeline.data.records import Completion
from pipeline.errors import EngineUnavailableError, EngineVersionError, RetryableError
from pipeline.ports.engines import Sampling
from pipeline.ports.weight_check import WeightCheck
from pipeline.stopwatch import Stopwatch
from rollout_sglang.client import EngineClient
from rollout_sglang.protocol import UNKNOWN_ENGINE, UNVERIFIED, claimed_version
from rollout_sglang.router import RouterClient
from rollout_sglang.weight_verifier import WeightVerifier, invalidate
from rollout_sglang.weights.locks import exclusive_lock

ATTEMPTS = 4
"""Failed answers that one `generate` takes before it gives up. Waiting for an engine to come back is not counted."""
UPDATE_ATTEMPTS = 2
"""How often an engine is given one version before it is quarantined."""
_PROBE_PAUSE_S = 0.5
_FIRST_RETRY_PAUSE_S = 0.05
T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """The version that every engine should serve, where its weights lie, and how it is verified that an engine holds
    them."""

    version: int
    directory: Path
    check: WeightCheck | None


class FleetSettings(TypedDict):
    """What a Fleet takes beside the engines' URLs."""

    router_url: str | None
    api_key: str | None
    lock_path: Path
    request_deadline_s: float
    """Longest wait for an answer, and for an engine to come back."""
    load_deadline_s: float
    """Longest wait for an engine to serve new weights."""


class Fleet:
    """Implements pipeline.ports.engines.Engines over servers at `urls`; with `router_url`, requests go there.

    One process may use it from one event loop after another, but not from two at once.
    """

    def __init__(self, urls: Sequence[str], **settings: Unpack[FleetSettings]) -> None:
        router_url, api_key = settings["router_url"], settings["api_key"]
        request_deadline_s = settings["request_deadline_s"]
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
        self._lock_path = settings["lock_path"]
        self._request_deadline_s = request_deadline_s
        self._load_deadline_s = settings["load_deadline_s"]
        self._target: Target | None = None
        self._quarantined: set[int] = set()
        self._verified: dict[int, Target] = {}
        """By engine, what this process has verified; forgotten when the engine is quarantined."""
        self._verifier = WeightVerifier(self._load_deadline_s)
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
                await self._mark_suspect(engine)
            await asyncio.sleep(_FIRST_RETRY_PAUSE_S * 2 ** len(failures))
        raise EngineUnavailableError(f"{ATTEMPTS} engines in a row failed one request; the last: {failures[-1]}")

    async def load(self, version: int, directory: Path, check: WeightCheck | None = None) -> dict[str, float]:
        """Give `version` to every engine and verify it, by `check` or else by the one in `directory`.

        Returns the slowest engine's pause_s, load_s, checksum_s, probe_s, and lock_s; with a probe, the largest
        probe_gap_nats; and engines_checked, how many engines could show checksums. Engines that fail twice are
        quarantined. Raises EngineUnavailableError when none serves `version`.
        """
        watch = Stopwatch()
        target = Target(version, directory, check or WeightCheck.load(directory))
        async with exclusive_lock(self._lock_path, self._load_deadline_s) as record:
            watch.lap("lock_s")
            self._target = target
            write_record(record, version)
            results = await all_of(self._update_engine(engine, target) for engine in self._engines)
        return summarize(version, results) | watch.seconds

    async def resync(self, version: int, directory: Path) -> None:
        """Admit the engines that hold `version`, give it to those that claim another one, and quarantine those that do
        not answer or cannot be verified.

        When another process has meanwhile loaded another version, the caller is behind: no engine is given weights.
        """
        target = self._target = Target(version, directory, WeightCheck.load(directory))
        verified = all(self._verified.get(engine.index) == target for engine in self._engines)
        if verified and not self._quarantined and await self._all_serve(version):
            return
        async with exclusive_lock(self._lock_path, self._load_deadline_s) as record:
            superseded = _read_record(record) not in (None, version)
            await all_of(self._resync_one(engine, target, superseded) for engine in self._engines)

    async def versions(self) -> dict[str, int | None]:
        """URL → policy version that the engine serves; None where it does not answer or serves none of ours."""
        found = await all_of(_version_of(engine) for engine in self._engines)
        return {engine.url: version for engine, version in zip(self._engines, found, strict=True)}

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

    async def _mark_suspect(self, engine: EngineClient) -> None:
        """Quarantine the engine that failed. The router does not say which engine that was: each one is asked then."""
        if engine is not self._entrance:
            await self._quarantine(engine)
            return
        self._router_is_suspect = True
        found = await all_of(_version_of(candidate) for candidate in self._engines)
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
            await self.resync(self._target.version, self._target.directory)
            return
        for engine in [self._engines[index] for index in sorted(self._quarantined)]:
            if await _version_of(engine) is not None:
                await self._admit(engine)

    async def _resync_one(self, engine: EngineClient, target: Target, superseded: bool) -> None:
        served, claimed = await _versions_of(engine)
        if claimed == target.version and await self._holds(engine, target, named=served is not None):
            await self._admit(engine)
        elif not await engine.health():
            await self._quarantine(engine)
        elif not superseded:
            await self._update_engine(engine, target, UPDATE_ATTEMPTS - (claimed == target.version))
        elif served is not None and served > target.version:
            await self._admit(engine)
        else:
            await self._quarantine(engine)

    async def _holds(self, engine: EngineClient, target: Target, *, named: bool) -> bool:
        """Whether an engine that claims the version holds it. It is verified once; again after it was quarantined, or
        restarted, which takes the version's name from it."""
        if named and self._verified.get(engine.index) == target:
            return True
        try:
            await self._verify(engine, target.version, target.check)
        except RetryableError:
            return False
        self._verified[engine.index] = target
        return True

    async def _update_engine(
        self, engine: EngineClient, target: Target, attempts_left: int = UPDATE_ATTEMPTS
    ) -> dict[str, float] | str:
        """Give the weights and verify them, `attempts_left` times at most. What it took, or why it is quarantined."""
        try:
            while True:
                try:
                    seconds = await self._update_engine_once(engine, target)
                    break
                except EngineVersionError:
                    attempts_left -= 1
                    if attempts_left == 0:
                        raise
            self._verified[engine.index] = target
            await self._admit(engine)
        except RetryableError as error:
            await self._quarantine(engine)
            return str(error)
        return seconds

    async def _update_engine_once(self, engine: EngineClient, target: Target) -> dict[str, float]:
        watch = Stopwatch()
        try:
            await engine.pause()
            watch.lap("pause_s")
            await engine.update_from_disk(target.version, target.directory, deadline_s=self._load_deadline_s)
            watch.lap("load_s")
        except RetryableError:
            await invalidate(engine)  # a load that failed may have changed part of the weights
            raise
        return watch.seconds | await self._verify(engine, target.version, target.check)

    async def _verify(self, engine: EngineClient, version: int, check: WeightCheck | None) -> dict[str, float]:
        """See WeightVerifier.verify; does not admit the engine."""
        return await self._verifier.verify(engine, version, check)

    async def _quarantine(self, engine: EngineClient) -> None:
        self._quarantined.add(engine.index)
        self._verified.pop(engine.index, None)
        if self._router is not None:
            await self._router.remove(engine.url)

    async def _admit(self, engine: EngineClient) -> None:
        if self._router is not None:
            await self._router.admit(engine.url)
        self._quarantined.discard(engine.index)


async def all_of(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all calls. A failure cancels none of the others: the first error is raised when all have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


async def _version_of(engine: EngineClient) -> int | None:
    return (await _versions_of(engine))[0]


async def _versions_of(engine: EngineClient) -> tuple[int | None, int | None]:
    """The version that an engine serves verified, and the one that it claims; None where there is none or no answer."""
    try:
        name = (await engine.model_info()).weight_version
    except RetryableError:
        return None, None
    claimed = claimed_version(name)
    return (None if name.startswith(UNVERIFIED) else claimed), claimed


def summarize(version: int, results: Sequence[dict[str, float] | str]) -> dict[str, float]:
    """What a weight update took, over all engines: the largest of each number, but engines_checked is a count.

    A result is an engine's numbers or why it failed. Raises EngineUnavailableError when all failed.
    """
    taken = [result for result in results if isinstance(result, dict)]
    if not taken:
        raise EngineUnavailableError(
            f"no engine of {len(results)} took version {version}; {'; '.join(map(str, results))}"
        )
    total = {name: max(one[name] for one in taken) for name in taken[0]}
    return total | {"engines_checked": sum(one["engines_checked"] for one in taken)}


def write_record(descriptor: int, version: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"version": version}).encode(), 0)


def _read_record(descriptor: int) -> int | None:
    text = os.pread(descriptor, 4096, 0)
    return int(json.loads(text)["version"]) if text else None
