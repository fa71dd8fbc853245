"""Use all engines of a run as one: route requests to them, give them weights, and watch their health.

An engine is *admitted* (gets requests) while it answers and serves at least this fleet's target version. Otherwise, as
at its start, it is quarantined until it is verified. Engines come, move and go during the run
(rollout_sglang.engine_pool). Two processes give weights to the same engines: the learner publishes, the collector
resyncs. Each update has a number, and engines refuse a lower one (weights.update_lease).

    generate   waits for an admitted engine; quarantines an engine that fails and asks the next one; quarantines a
               healthy engine only after several bad answers
    load       number → all engines take the weights at once → each is verified → those that fail are quarantined
    resync     number → quarantined engines that claim this run's version are verified, the others are given its
               weights, unless another process has given a later version
    monitored  looks at all engines once a second (Monitor), and resyncs those that came, or came back

Where engines and learner take turns on the same GPUs (rollout.colocated), the learner puts the engines to sleep before
it trains. Only its publish wakes them: the others leave a sleeping engine alone.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeVar, Unpack

from pipeline.data.batch import Completion, Sampling
from pipeline.data.checksums import verify_folder
from pipeline.data.deltas import is_whole, read_link
from pipeline.data.membership import Member, Membership
from pipeline.data.quant_maps import digest_of, older_folder, read_quant_map
from pipeline.data.run_directory import numbered
from pipeline.errors import (
    BadAnswerError,
    EngineHungError,
    EngineUnavailableError,
    EngineVersionError,
    EvenKeelError,
    FatalError,
    RequestFailedError,
    RetryableError,
    SupersededError,
)
from pipeline.ports.affinity import Affinity
from pipeline.ports.load import InFlight
from pipeline.ports.weights import ComingCheck, WeightCheck
from pipeline.spans import Stopwatch
from precision.text import one_line
from rollout_sglang.engine_pool import (
    EnginePool,
    EngineState,
    OnChange,
    PooledEngine,
    all_of,
    look,
    serves,
    summarize,
    weigh,
)
from rollout_sglang.transport import LOOK_DEADLINE_S, SILENCE_S
from rollout_sglang.weight_verifier import WeightVerifier, invalidate
from rollout_sglang.weights.replica import replica_name
from rollout_sglang.weights.update_lease import UpdateKind, Updates

ATTEMPTS = 4
"""Failed answers after which `generate` gives up. Waiting for an engine to come back does not count."""
REFUSALS = ATTEMPTS - 1
"""Refusals, by two engines if there are two, after which the request counts as wrong; a router's refusal is extra."""
UPDATE_ATTEMPTS = 2
"""How often an engine is given a version before it is quarantined."""
AGAIN_DEADLINE_S = 1.0
"""Deadline for engines that were silent at the last update too: a lost host must not delay each step by seconds. The
process that monitors the fleet gives the weights to an engine that answers later."""
_PROBE_PAUSE_S = 0.2
_FIRST_RETRY_PAUSE_S = 0.05
T = TypeVar("T")


class Fleet:
    """The engines of a membership. Requests go through a router, if there is one and it answers, except requests for
    records of the engine (kept sets, experts), turns of episodes, and all requests where keys and values are kept. A
    process may use it from several event loops in sequence, but not from two at once."""

    def __init__(self, membership: Membership, **settings: Unpack[FleetSettings]) -> None:
        self._request_deadline_s = settings["request_deadline_s"]
        self._load_deadline_s = settings["load_deadline_s"]
        self._updates = settings["updates"]
        self._keeps_kv = settings.get("keeps_kv", False)
        self._colocated = settings.get("colocated", False)
        key, told = settings["api_key"], settings.get("on_change")
        self._pool = EnginePool(membership, key, self._request_deadline_s, told, keeps_kv=self._keeps_kv)
        self._target: Target | None = None
        self._oldest_allowed: int | None = None
        """The target's version: the least that an engine should serve."""
        self._silent: set[Member] = set()
        """Engines that did not answer when the last update began."""
        self._verifier = WeightVerifier(self._load_deadline_s)
        self._monitor: asyncio.Task[None] | None = None
        self._probe: asyncio.Task[None] | None = None

    def state(self) -> tuple[EngineState, ...]:
        """Return the state of every engine. May be called from another thread."""
        states = []
        for one in self._pool.engines:
            why, since = one.quarantined, one.since if one.quarantined is not None else None
            known = one.index, one.url, one.served, why is not None, len(one.calls), why, since, one.load
            states.append(EngineState(*known))
        return tuple(states)

    async def generate(
        self, prompt: Sequence[int], num_samples: int, sampling: Sampling, affinity: Affinity | None = None
    ) -> list[Completion]:
        """Sample a group on one engine: for a turn of an episode, on the one that holds its context, if that is
        admitted. Waits up to the request deadline while no engine is admitted. Raises
        EngineUnavailableError when no engine came back, or after ATTEMPTS failed answers; FatalError after REFUSALS,
        and for a prompt that would crash SGLang."""
        most = math.inf if sampling.vocab_size is None else sampling.vocab_size
        if len(prompt) == 0 or min(prompt) < 0 or max(prompt) >= most:
            raise FatalError(
                f"a prompt has {len(prompt)} tokens, ids {min(prompt, default='none')} to {max(prompt, default='none')}"
                f", expected at least one, ids 0 to {most - 1:g}: an engine would end at it; correct the prompts of "
                "the task, or its tokenizer"
            )
        ends = time.monotonic() + self._request_deadline_s
        failures, refused_by = list[str](), list[int]()
        doubted, direct = set[PooledEngine](), False
        while len(failures) < ATTEMPTS:
            engine = await self._admitted_engine(ends, doubted, affinity)
            # The router (0.3.2) drops unknown fields of a request, such as those for records, and chooses the engine.
            own = sampling.kept_set or sampling.experts is not None or self._keeps_kv or affinity is not None
            routed = self._pool.entrance is not None and not own
            suspect = self._pool.router_is_suspect or time.monotonic() < self._pool.direct_until
            asked = None if routed and not suspect and not direct else engine
            try:
                return await self._ask(asked, prompt, num_samples, sampling, affinity)
            except (EngineUnavailableError, EngineVersionError) as error:
                failures.append(str(error))
                # SGLang also answers 500 or 503 for reasons of one request: no memory for it, a full queue. Such an
                # engine is doubted only after several.
                only_an_answer = isinstance(error, BadAnswerError)
                if isinstance(error, RequestFailedError) and asked is not None:
                    only_an_answer = await serves(asked, self._oldest_allowed)
                if only_an_answer:
                    doubted |= set() if asked is None else {asked}
                    await self._pool.answered_badly(asked, str(error))
                else:
                    await self._pool.mark_suspect(asked, str(error), self._oldest_allowed)
                    if self._pool.in_flight is not None and self._pool.in_flight.is_overdrawn:
                        raise  # the others have enough to do: the prompt waits for its turn
            except FatalError as error:
                failures.append(str(error))
                if asked is None:  # another server may have its address: ask the engine directly
                    direct = self._pool.router_is_suspect = True
                    await self._pool.answered_badly(None, str(error))
                elif (await look(engine))[1] is None:
                    await self._pool.refused(engine, error)
                else:  # the right server: either it errs, or the request is wrong
                    doubted.add(engine)
                    refused_by.append(engine.index)
                    if len(refused_by) >= REFUSALS and len({*refused_by}) >= min(2, len(self._pool.engines)):
                        raise FatalError(f"engines {refused_by} refused one request, the last: {error}") from error
                    await self._pool.answered_badly(engine, str(error))
            await asyncio.sleep(_FIRST_RETRY_PAUSE_S * 2 ** len(failures))
        raise EngineUnavailableError(f"{ATTEMPTS} engines in a row failed one request; the last: {failures[-1]}")

    async def load(self, version: int, directory: Path, check: WeightCheck | None = None) -> dict[str, float]:
        """Give `version` to every engine and verify it, by `check` or else by the check in `directory`. Returns the
        slowest engine's prepare_s, stage_s, pause_s, load_s, checksum_s, probe_s, and lock_s; with a probe, the largest
        probe_gap_nats; and engines_checked, the number that could show checksums. Engines that fail twice are
        quarantined. Raises EngineUnavailableError when none serves `version`."""
        watch = Stopwatch()
        target = Target(version, directory, check or WeightCheck.load(directory, version))
        async with self._updates.take("publish", self._load_deadline_s) as update:
            watch.lap("lock_s")
            self._aim_at(target)
            results, ends = list[dict[str, float] | str](), time.monotonic() + self._load_deadline_s
            while not any(isinstance(result, dict) for result in results):
                engines, absent = await self._answering()
                results = await all_of(self._update_engine(engine, target, update.number) for engine in engines)
                lost = [engine for engine in engines if await asyncio.to_thread(self._pool.lost, engine.member)]
                if not lost or time.monotonic() > ends:
                    break  # else all answering engines were lost: wait for their restart
            numbers = summarize(version, [*results, *absent.values()])
            update.given = version
        return numbers | watch.seconds

    async def put_to_sleep(self) -> float:
        """Have every engine give its GPUs' memory to the learner until it is given weights; return the seconds. An
        engine that does not answer, or dies meanwhile, has none, or its role ends it. Raises RetryableError when
        another one fails."""
        watch = Stopwatch()
        async with self._updates.take("sleep", self._load_deadline_s) as update:
            await self._pool.refresh()

            async def sleep(engine: PooledEngine) -> None:
                engine.client.take_part(update.number)
                try:
                    if await engine.client.health():
                        await self._require_sleep(engine)
                        await self._while_alive(engine, engine.client.sleep(deadline_s=self._load_deadline_s))
                except RetryableError:
                    if await engine.client.health():
                        raise

            await all_of(sleep(engine) for engine in self._pool.engines)
        watch.lap("sleep_s")
        return watch.seconds["sleep_s"]

    async def _require_sleep(self, engine: PooledEngine) -> None:
        """Raise FatalError where engines and learner take turns, and the engine cannot give up its memory."""
        if self._colocated and not (await engine.client.dialect()).sleeps:
            raise FatalError(
                f"engine {engine.index} at {engine.url} was started without --enable-memory-saver, and keeps its GPU's "
                "memory while the learner trains; have the run start it, or set rollout.colocated=false"
            )

    async def resync(self, version: int, directory: Path) -> None:
        """Admit engines that hold `version` verified: give it to engines that claim another version, and quarantine
        engines that do not answer or cannot be verified. A monitored fleet returns as soon as one engine is admitted;
        the monitor resyncs the others. When another process has given a later version, the caller is behind: no engine
        is given weights."""
        self._aim_at(await asyncio.to_thread(Target.read, version, directory, self._target))
        await self._share_resync()

    @asynccontextmanager
    async def monitored(
        self, published: Callable[[], tuple[int, Path]], in_flight: InFlight | None = None
    ) -> AsyncIterator[None]:
        """Notice within seconds, while the block runs, that engines come, move, fail or come back. `published` returns
        the published version and its folder; `in_flight` is told how much the engines have to do. The next `generate`
        raises an error that ended the monitor, such as SupersededError for a later start of this role."""

        async def resync(engines: Sequence[PooledEngine]) -> None:
            self._aim_at(await asyncio.to_thread(Target.read, *published(), self._target))
            await self._resync_engines(engines)

        self._pool.in_flight = in_flight
        self._pool.report_loads()
        monitor = Monitor(self._pool, self._updates, resync, lambda: published()[0])
        task = self._monitor = asyncio.create_task(monitor.run())
        try:
            yield
        finally:
            self._monitor = None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def versions(self) -> dict[str, int | None]:
        """Return engine URL → the verified policy version that it serves; None where there is none or no answer."""
        await self._pool.refresh()
        found = await all_of(look(engine) for engine in self._pool.engines)
        return {engine.url: served for engine, (served, _) in zip(self._pool.engines, found, strict=True)}

    async def close(self) -> None:
        if self._probe is not None and not self._probe.done():
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)
        await self._pool.close()

    async def _ask(
        self,
        engine: PooledEngine | None,
        prompt: Sequence[int],
        num_samples: int,
        sampling: Sampling,
        affinity: Affinity | None,
    ) -> list[Completion]:
        """Return one answer of the engine, or of any engine behind the router for None."""
        oldest_allowed = self._oldest_allowed
        client = self._pool.entrance if engine is None else engine.client
        if client is None:
            raise EngineUnavailableError("the router has left; the request is asked again")
        key = None if affinity is None else affinity.key
        completions = await self._pool.ask(engine, client.generate(prompt, num_samples, sampling, key))
        oldest = min((version for c in completions for version in c.distinct_versions[:1]), default=None)
        if oldest is not None and oldest_allowed is not None and oldest < oldest_allowed:
            raise EngineVersionError(
                f"{client.url} sampled with version {oldest}, expected {oldest_allowed} or later: it was restarted "
                "unnoticed; its answer is thrown away"
            )
        if engine is not None:
            engine.answers.good()
        if affinity is not None:
            for completion in completions:
                affinity.answered(prompt, completion, keeps_kv=self._keeps_kv)
        return completions

    async def _admitted_engine(
        self, ends: float, doubted: Collection[PooledEngine], affinity: Affinity | None
    ) -> PooledEngine:
        """Return EnginePool.choose, once an engine is admitted. Raises EngineUnavailableError at time `ends`."""
        while True:
            if self._monitor is not None and self._monitor.done():
                self._monitor.result()
            if not self._pool.admitted and self._monitor is None:
                await self._share_resync()
            if self._pool.admitted:
                return self._pool.choose(doubted, None if affinity is None else affinity.engine)
            self._pool.check_refusals()
            if time.monotonic() > ends:
                quarantined = self._pool.quarantined[:3]
                reasons = "".join(f"; engine {one.index}: {one_line(one.quarantined, 400)}" for one in quarantined)
                raise EngineUnavailableError(
                    f"none of {len(self._pool.engines)} engines came back within {self._request_deadline_s:g} s; "
                    f"see logs/ of the run for why they died{reasons}"
                )
            await asyncio.sleep(_PROBE_PAUSE_S)

    def _aim_at(self, target: Target) -> None:
        self._target, self._oldest_allowed = target, target.version

    async def _share_resync(self) -> None:
        """Resync, or join a resync under way."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._resync())
        await asyncio.shield(self._probe)

    async def _resync(self) -> None:
        """Give every quarantined engine a chance to come back."""
        target = self._target
        await self._pool.refresh()
        if target is None:
            for engine in self._pool.returnable:
                served, _ = await look(engine)
                if served is not None:
                    await self._pool.admit(engine, served)
            return
        admitted, settled = self._pool.admitted, self._updates.settled()
        found = await all_of(look(engine) for engine in admitted)
        if settled is not None and self._updates.newest() == settled[0]:
            for engine, (served, _) in zip(admitted, found, strict=True):
                if served is None or served < target.version:
                    await self._pool.quarantine(engine, f"it serves version {served}, expected {target.version}")
        if not (self._monitor is not None and self._pool.admitted) and self._pool.returnable:
            await self._resync_engines(self._pool.returnable)
        await self._pool.sync_router()

    async def _resync_engines(self, engines: Sequence[PooledEngine]) -> None:
        target = self._target
        assert target is not None, "the callers name it"
        kind: UpdateKind = "resync_single" if self._pool.admitted else "resync"
        async with self._updates.take(kind, self._load_deadline_s) as update:
            # Cached listings may show an old version as given last for a while, but versions only rise.
            superseded = update.given is not None and update.given > target.version
            await all_of(self._bring_back(engine, target, update.number, superseded) for engine in engines)

    async def _bring_back(self, engine: PooledEngine, target: Target, number: int, superseded: bool) -> None:
        engine.client.take_part(number)
        try:
            served, claimed = await look(engine)
            if engine.asleep:
                await self._pool.quarantine(engine, "it sleeps until the learner's next publish")
                return
            holds = False  # whether it has this run's weights under the claimed version; False if nothing can tell
            if claimed == target.version:
                with suppress(RetryableError):
                    own = await asyncio.to_thread(target.of_map, engine.member)
                    if engine.is_believed or own.has_digests:
                        measured = await self._while_alive(engine, self._verify(engine, own.version, own.coming))
                        holds = engine.is_believed or measured["engines_checked"] > 0
            if holds:
                await self._pool.admit(engine, target.version)
            elif not await engine.client.health():
                await self._pool.quarantine(engine, "it does not answer")
            elif not superseded:
                await self._update_engine(engine, target, number, UPDATE_ATTEMPTS - (claimed == target.version))
            elif served is not None and served > target.version and engine.is_believed:
                await self._pool.admit(engine, served)
            else:
                await self._pool.quarantine(
                    engine, f"it serves version {served}, and a later one than {target.version}"
                )
        except FatalError as error:
            await self._pool.refused(engine, error)

    async def _answering(self) -> tuple[list[PooledEngine], dict[int, str]]:
        """Return the answering engines, once there is one, and for each other engine why it is left out and
        quarantined. Raises EngineUnavailableError when no engine answers within the deadline."""
        ends = time.monotonic() + self._load_deadline_s
        self._pool.router_is_suspect = False

        async def is_well(engine: PooledEngine) -> bool:
            deadline_s = AGAIN_DEADLINE_S if engine.member in self._silent else LOOK_DEADLINE_S
            try:
                return not engine.member.silent and await engine.client.health(deadline_s)
            except FatalError as error:
                await self._pool.refused(engine, error)
            return False

        while True:
            await self._pool.refresh()
            engines = self._pool.engines
            healthy = await all_of(is_well(engine) for engine in engines)
            if any(healthy):
                break
            if time.monotonic() > ends:
                raise EngineUnavailableError(
                    f"none of {len(engines)} engines has answered for {self._load_deadline_s:g} s; see logs/ of the run"
                )
            await asyncio.sleep(_PROBE_PAUSE_S)
        absent = [engine for engine, well in zip(engines, healthy, strict=True) if not well]
        self._silent = {engine.member for engine in absent}
        left_out = dict[int, str]()
        for engine in absent:
            why = engine.trouble or "it does not answer"
            await self._pool.quarantine(engine, why)
            left_out[engine.index] = f"engine {engine.index} at {engine.url}: {why}"
        return [engine for engine in engines if engine.index not in left_out], left_out

    async def _update_engine(
        self, engine: PooledEngine, target: Target, number: int, attempts_left: int = UPDATE_ATTEMPTS
    ) -> dict[str, float] | str:
        """Give the engine the weights and verify them, in at most `attempts_left` tries. Return times or an error."""
        client = engine.client
        client.take_part(number)
        try:
            own, seconds = await self._while_alive(engine, prepared(self._pool, engine, target, self._load_deadline_s))
            while attempts_left:
                attempts_left -= 1
                watch, loaded = Stopwatch(lane=f"engine {engine.index}/weights", version=target.version), False
                try:
                    await self._while_alive(engine, client.pause())
                    if self._colocated:  # a learner that died in a publish leaves it half awake
                        await client.wake(deadline_s=self._load_deadline_s)
                    watch.lap("pause_s")
                    loading = client.update_from_disk(target.version, own.directory, deadline_s=self._load_deadline_s)
                    await self._while_alive(engine, loading)
                    watch.lap("load_s")
                    loaded = True
                    checked = await self._while_alive(engine, self._verify(engine, target.version, own.coming))
                except EvenKeelError as error:
                    if not loaded and not isinstance(error, EngineHungError):
                        await invalidate(client)  # a failed load may have changed part of the weights
                    if not attempts_left or not isinstance(error, EngineVersionError):
                        raise
                else:
                    seconds |= watch.seconds | checked
                    break
            await self._pool.admit(engine, target.version)
        except RetryableError as error:
            await self._pool.quarantine(engine, str(error))
            return str(error)
        except FatalError as error:
            return await self._pool.refused(engine, error)
        return seconds

    async def _while_alive(self, engine: PooledEngine, call: Coroutine[Any, Any, T]) -> T:
        """Await a call as Transport.while_alive does. An engine whose role reports a hang is not waited for."""
        return await engine.client.while_alive(call, partial(self._pool.lost, engine.member))

    async def _verify(self, engine: PooledEngine, version: int, check: ComingCheck) -> dict[str, float]:
        """Verify as WeightVerifier.verify does, without admitting the engine. Formats are verified before each
        admission, not for each version; but always for rollout.urls, whose servers may restart under the same URL."""
        await self._require_sleep(engine)
        is_known = engine.member.started > 0 and engine.quarantined is None and engine.formats == check.formats
        measured = await self._verifier.verify(engine.client, version, check, formats_are_known=is_known)
        engine.formats = check.formats
        return measured


@dataclass(frozen=True)
class Target:
    """The version that every engine should serve, the folder of its weights, and the check that verifies an engine."""

    version: int
    directory: Path
    check: WeightCheck | None
    coming: ComingCheck = field(init=False, compare=False, repr=False)
    """The check, complete."""
    has_digests: bool = field(init=False, compare=False, repr=False)
    """Whether checksums alone tell the version's weights from all others."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "coming", ComingCheck.known(self.version, self.check))
        object.__setattr__(self, "has_digests", self.check is not None and bool(self.check.digests))

    @staticmethod
    def read(version: int, directory: Path, known: Target | None = None) -> Target:
        """Read the target of a policy folder, with its check. Without digests, compare the files with their checksums,
        unless the target equals `known`. Raises StoreError for a folder that is damaged or holds another version."""
        target = Target(version, directory, WeightCheck.load(directory, version))
        if target != known and target.check is not None and not target.has_digests:
            verify_folder(directory, "stop the run and repair it: `evenkeel repair`")
        return target

    def of_map(self, engine: Member) -> Target:
        """Return the target of one engine, in the formats of the quant map that it was started with. Raises
        EngineVersionError where the version was published after the last engine with that map had gone."""
        if not engine.quant_map:
            return self
        older = older_folder(self.directory, engine.quant_map)
        if older.is_dir():
            return Target(self.version, older, WeightCheck.load(older, self.version))
        newest = digest_of(read_quant_map(self.directory))
        if newest not in ("", engine.quant_map):  # empty before the folder of a broadcast is written
            raise EngineVersionError(
                f"engine {engine.index} at {engine.url} was started with quant map {engine.quant_map}, and version "
                f"{self.version} is there for map {newest} alone; it is started again with that when it is its turn"
            )
        return self


class FleetSettings(TypedDict):
    updates: Updates
    api_key: str | None
    request_deadline_s: float
    """Longest wait for an answer, and for an engine to come back."""
    load_deadline_s: float
    """Longest wait for an engine to serve new weights."""
    colocated: NotRequired[bool]
    """Whether engines sleep while the learner trains."""
    keeps_kv: NotRequired[bool]
    """Whether requests under way keep the old weights' keys and values; by default they are prefilled again."""
    on_change: OnChange | None


PERIOD_S = 1.0
_LONGEST_PAUSE_S = 30.0
"""Between two attempts to resync an engine that fails each time; the first pauses are shorter."""
_log = logging.getLogger(__name__)


class Monitor:
    """A task that looks at all engines each second, and resyncs those that came, or came back."""

    def __init__(
        self,
        pool: EnginePool,
        updates: Updates,
        resync: Callable[[Sequence[PooledEngine]], Awaitable[None]],
        published: Callable[[], int],
    ) -> None:
        """`resync` gives the published version to engines and verifies them."""
        self._pool = pool
        self._updates = updates
        self._resync = resync
        self._published = published
        self._resyncing: asyncio.Task[None] | None = None
        self._syncing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        try:
            while True:
                try:
                    await self.look()
                except (SupersededError, asyncio.CancelledError):
                    raise
                except (EvenKeelError, OSError) as error:
                    _log.warning("a look at the engines failed, the next one follows: %s", error)
                await asyncio.sleep(PERIOD_S)
        finally:
            beside = [task for task in (self._resyncing, self._syncing) if task is not None]
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    async def look(self) -> None:
        """Look once. Raises the error of the last resync."""
        if self._resyncing is not None and self._resyncing.done():
            resyncing, self._resyncing = self._resyncing, None
            resyncing.result()
        await self._pool.refresh()
        settled = await asyncio.to_thread(self._updates.settled)
        if settled is not None:
            # Versions only rise: a lower one comes from an update that saw a cached listing.
            settled = settled[0], max(await asyncio.to_thread(self._published), settled[1] or 0)
        engines = self._pool.engines
        began = time.monotonic()
        asked = [engine for engine in engines if not engine.member.silent]
        await asyncio.gather(*map(look, asked), *(weigh(engine) for engine in asked if self._pool.has_work(engine)))
        self._pool.report_loads()
        wrong = dict[PooledEngine, str]()
        if settled is not None and self._updates.newest() == settled[0]:
            seen = [e for e in engines if e.answered >= began and e.served != settled[1] and not e.asleep]
            wrong = {engine: f"it serves version {engine.served}, expected {settled[1]}" for engine in seen}
        for engine in engines:
            silent_s, reason, abandons = time.monotonic() - engine.answered, engine.trouble, engine.quarantined is None
            if not reason and abandons:
                # A publish that lost an engine of another version has left it paused: it would not answer.
                silent = f"it has answered nothing for {silent_s:.0f} s"
                reason = silent if silent_s > SILENCE_S else wrong.get(engine, "")
            if reason and engine.quarantined != reason:
                await self._pool.quarantine(engine, reason)
            if reason and abandons:
                self._pool.abandon(engine, reason)
        answering = [e for e in self._pool.returnable if e.answered >= began and e.try_at <= time.monotonic()]
        answering = [e for e in answering if not e.asleep]
        if answering and self._resyncing is None:
            self._resyncing = asyncio.create_task(self._try_to_resync(answering))
        if self._syncing is None or self._syncing.done():  # in a separate task: a hung router delays no look
            self._syncing = asyncio.create_task(self._pool.sync_router())

    async def _try_to_resync(self, engines: Sequence[PooledEngine]) -> None:
        try:
            await self._resync(engines)
        except (RetryableError, OSError) as error:
            _log.warning("%d engines could not be resynced, they are tried again: %s", len(engines), error)
        finally:
            for engine in engines:
                if engine.quarantined is not None:
                    engine.failures += 1
                    engine.try_at = time.monotonic() + min(_LONGEST_PAUSE_S, 2.0 ** min(engine.failures, 6) / 2)


_POLL_S = 0.05


async def prepared(
    pool: EnginePool, engine: PooledEngine, target: Target, deadline_s: float
) -> tuple[Target, dict[str, float]]:
    """Return the target as the engine loads it, once its folder is there and, if possible, staged; and prepare_s and
    stage_s, the waits for both. Raises EngineVersionError when the engine's replica cannot be made, is beyond the
    target, or comes too late, and as Target.of_map does."""
    watch = Stopwatch(lane=f"engine {engine.index}/weights", version=target.version)
    member = engine.member
    own = await asyncio.to_thread(target.of_map, member)
    if member.replicas:
        link = await asyncio.to_thread(read_link, own.directory.parent, own.version)
        name = replica_name(own.version, link.state)
        own = replace(own, directory=await _replica(pool, member, own.version, name, deadline_s))
    elif not is_whole(own.directory):
        raise EngineVersionError(
            f"engine {engine.index} at {engine.url} has no replica, and {own.directory} holds only what changed; start "
            "it by `evenkeel role engine`, or publish by another channel (weights.channel)"
        )
    watch.lap("prepare_s")
    if engine.quarantined is None:  # a quarantined engine serves no requests, and may be paused
        with suppress(EngineUnavailableError, EngineVersionError):  # loading it, paused, will report the error
            await engine.client.stage_folder(own.directory, deadline_s=deadline_s)
    watch.lap("stage_s")
    return own, watch.seconds


async def _replica(pool: EnginePool, member: Member, version: int, name: str, deadline_s: float) -> Path:
    """Return the engine's folder `name`, once it is announced."""
    whose, ends = f"engine {member.index} at {member.url}", time.monotonic() + deadline_s
    while True:
        now = await asyncio.to_thread(pool.listed, member) or member
        folders = {Path(path).name: Path(path) for path in now.replicas}
        if name in folders:
            return folders[name]
        stuck, _, reason = now.stuck.partition(": ")
        if stuck in (name, numbered(version)):
            raise EngineVersionError(f"{whose} cannot make its replica {name}: {reason}")
        if folders and max(folders).partition("-")[0] > numbered(version):
            raise EngineVersionError(
                f"{whose} has a replica of {max(folders)}, beyond {name}; it waits for the publish"
            )
        if time.monotonic() > ends:
            raise EngineVersionError(
                f"{whose} did not make its replica {name} within {deadline_s:g} s (it has {', '.join(folders)}); see "
                "the log of its role"
            )
        await asyncio.sleep(_POLL_S)
