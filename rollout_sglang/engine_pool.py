"""Track the engines of a run: build them from the membership, admit or quarantine each, and keep the router in step.

    membership ──refresh──▶ engines: joined (quarantined until verified), moved or restarted (the same), left
    admit / quarantine ──▶ the router's workers, requests in flight, on_change

An engine is one start of a server: another URL or another start under the same index is another engine.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from pipeline.data.membership import Listed, Member, Membership
from pipeline.errors import EngineUnavailableError, FatalError, RetryableError
from pipeline.ports.load import EngineLoad, InFlight
from rollout_sglang.client import EngineClient
from rollout_sglang.protocol import ASLEEP, UNKNOWN_ENGINE, UNVERIFIED, Workers, claimed_version
from rollout_sglang.transport import LOOK_DEADLINE_S, SILENCE_S, Transport

T = TypeVar("T")
OnChange = Callable[..., None]
"""Called with "joined", "admitted", "quarantined", "bad_answer" or "left", and with engine=, url= and, except for
"admitted", reason=. It is called with each new reason for quarantining an engine."""
REFUSED_S = 60.0
"""When all engines refuse for REFUSED_S, the key or the addresses are wrong, not just a stale address."""
_LEFT = "it has left, or was started again"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineState:
    """The state of one engine, for people and metrics."""

    index: int
    url: str
    version: int | None
    """The verified version that it served at the last look; None when it served none."""
    quarantined: bool
    in_flight: int
    """Requests sent to it directly; the engines of requests through a router are unknown."""
    reason: str | None = None
    """Why it is quarantined."""
    since: float | None = None
    """When it was quarantined, in seconds since 1970."""
    load: EngineLoad | None = None
    """At the last look; None where it does not tell."""


@dataclass
class AnswerRecord:
    """A record of one engine's good and bad answers."""

    last: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Whether each of the last answers was good."""
    times: int = 0
    """How often the engine was quarantined for its answers."""
    until: float = 0.0
    """When it may come back, by time.monotonic."""

    def good(self) -> None:
        self.last.append(True)
        if self.times and len(self.last) == WINDOW and all(self.last):
            self.times = 0

    def bad(self) -> bool:
        """Count a bad answer. Return whether to quarantine the engine now."""
        self.last.append(False)
        if self.last.count(False) < MOST_BAD:
            return False
        self.last.clear()
        self.until = time.monotonic() + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self.times)
        self.times += 1
        return True


@dataclass(eq=False)
class PooledEngine:
    """One start of a server."""

    member: Member
    client: EngineClient
    quarantined: str | None
    """Why it gets no requests."""
    since: float
    served: int | None = None
    answered: float = field(default_factory=time.monotonic)
    calls: set[asyncio.Task[Any]] = field(default_factory=set)
    formats: Mapping[str, str] | None = None
    """The formats that its modules were verified to have, as in the quant map: they last as long as its server."""
    nccl: str | None = None
    """The release of NCCL that its server named (EngineClient.nccl); None before it was asked."""
    refusal: FatalError | None = None
    """The server's last refusal of a key or path; another server may have the address by now."""
    refused_at: float = math.inf
    """When it began to refuse (time.monotonic)."""
    failures: int = 0
    """Failed resyncs in a row."""
    try_at: float = 0.0
    answers: AnswerRecord = field(default_factory=AnswerRecord)
    load: EngineLoad | None = None
    """At the last look of a fleet that is monitored; None where it does not tell."""
    calls_then: int = 0
    """Its calls at that look."""
    asleep: bool = False
    """Whether it had given its memory to the learner at the last look."""
    is_believed: bool = field(init=False)
    """Whether its claimed version is one of this run's. A version is only a number, and an engine of rollout.urls may
    have served another run before it is admitted here."""
    index: int = field(init=False)
    url: str = field(init=False)

    def __post_init__(self) -> None:
        self.index, self.url = self.member.index, self.client.url
        self.is_believed = self.member.started > 0

    @property
    def trouble(self) -> str:
        """A known fault, without asking the engine; empty when there is none."""
        return self.member.silent or str(self.refusal or "")


class EnginePool:
    """The engines of a run by index, and the router before them, if any."""

    def __init__(
        self,
        membership: Membership,
        api_key: str | None,
        request_deadline_s: float,
        on_change: OnChange | None,
        *,
        keeps_kv: bool = False,
    ) -> None:
        self._membership = membership
        self._listed = Listed(membership)
        self._api_key = api_key
        self._request_deadline_s = request_deadline_s
        self._keeps_kv = keeps_kv
        self._on_change: OnChange = on_change or (lambda *_, **__: None)
        self._engines: dict[int, PooledEngine] = {}
        self._refreshes = self._refreshed = 0
        """Number of calls of `refresh`, and the last call whose reading was used."""
        self.router: RouterClient | None = None
        self.entrance: EngineClient | None = None
        """A client that samples through the router."""
        self.router_calls: set[asyncio.Task[Any]] = set()
        self.router_is_suspect = False
        self.direct_until = 0.0
        """Until then, by time.monotonic, engines are asked directly."""
        self.in_flight: InFlight | None = None
        """What is told the load of the admitted engines; None: nothing asks for it."""

    @property
    def engines(self) -> list[PooledEngine]:
        """All engines, by index."""
        return [engine for _, engine in sorted(list(self._engines.items()))]

    @property
    def admitted(self) -> list[PooledEngine]:
        """The engines that get requests."""
        return [engine for engine in self.engines if engine.quarantined is None]

    @property
    def returnable(self) -> list[PooledEngine]:
        """The quarantined engines that may be verified again."""
        return [
            engine
            for engine in self.quarantined
            if engine.answers.until <= time.monotonic() and not engine.member.silent
        ]

    @property
    def quarantined(self) -> list[PooledEngine]:
        """The engines that get no requests."""
        return [engine for engine in self.engines if engine.quarantined is not None]

    def __getitem__(self, index: int) -> PooledEngine:
        return self._engines[index]

    async def refresh(self) -> None:
        """Read the membership again. Among concurrent calls, the last one counts."""
        self._refreshes += 1
        number = self._refreshes
        listed, router = await asyncio.to_thread(lambda: (self._listed.engines(), self._membership.router()))
        if number < self._refreshed:
            return
        self._refreshed = number
        gone = self._take(listed)
        if router != (None if self.router is None else self.router.url):
            self.router = self.entrance = None
            self.router_is_suspect, self._router_answered = False, time.monotonic()
            if router is not None:
                self.router, self.entrance = RouterClient(router, self._api_key), self.client(router, UNKNOWN_ENGINE)
        try:
            for engine in gone:
                await self._tell_router(engine, admitted=False)
        finally:
            for engine in gone:
                self.abandon(engine, _LEFT)

    def _take(self, listed: Sequence[Member]) -> list[PooledEngine]:
        """Replace the known engines by the listed ones and return those that are gone. Not async: another `refresh` may
        begin while the router is updated."""
        members, gone = {member.index: member for member in listed}, list[PooledEngine]()
        for index, engine in list(self._engines.items()):
            if members.get(index) != engine.member:
                del self._engines[index]
                if engine.quarantined is None:
                    self._set_aside(engine, _LEFT)
                self._on_change("left", engine=index, url=engine.url, reason=_LEFT)
                gone.append(engine)
        for index, member in members.items():
            if index in self._engines:
                self._engines[index].member = member  # the same start; its role may report that it hangs
            else:
                client = self.client(member.url, index)
                reason = "it has joined and is not verified yet"
                self._engines[index] = PooledEngine(member, client, reason, time.time())
                self._on_change("joined", engine=index, url=member.url, reason=reason)
        return gone

    def client(self, url: str, index: int) -> EngineClient:
        return EngineClient(
            url, self._api_key, index=index, request_deadline_s=self._request_deadline_s, keeps_kv=self._keeps_kv
        )

    async def admit(self, engine: PooledEngine, version: int | None) -> None:
        """Let the engine have requests from now on, unless it has left meanwhile."""
        if self._engines.get(engine.index) is not engine:
            return
        engine.served, engine.failures, engine.answered = version, 0, time.monotonic()
        engine.is_believed = True
        await self._tell_router(engine, admitted=True)
        if self.in_flight is not None and engine.load is None:
            await weigh(engine)
        if engine.quarantined is not None:
            engine.quarantined = None
            self._on_change("admitted", engine=engine.index, url=engine.url, version=version)
            self.report_loads()

    async def quarantine(self, engine: PooledEngine, reason: str) -> None:
        """Let the engine have no more requests. Requests in flight go on: see `abandon`."""
        self._set_aside(engine, reason)
        await self._tell_router(engine, admitted=False)

    def _set_aside(self, engine: PooledEngine, reason: str) -> None:
        was_admitted = engine.quarantined is None
        if was_admitted:
            engine.since = time.time()
        if engine.quarantined != reason:
            engine.quarantined = reason
            self._on_change("quarantined", engine=engine.index, url=engine.url, reason=reason)
        engine.served = engine.load = None
        if was_admitted:
            self.report_loads()

    def report_loads(self) -> None:
        """Tell whoever asks for prompts how much the admitted engines have to do."""
        if self.in_flight is not None:
            self.in_flight.observe([engine.load for engine in self.admitted])

    def has_work(self, engine: PooledEngine) -> bool:
        """Return whether the engine's load is worth a look: somebody asks for it, and it may have requests."""
        if self.in_flight is None or engine.quarantined is not None:
            return False
        load = engine.load
        return bool(engine.calls or self.router_calls or load is None or load.running or load.waiting)

    def choose(self, doubted: Collection[PooledEngine], preferred: int | None = None) -> PooledEngine:
        """Return the admitted engine with the index `preferred`, or else that with the fewest live tokens, `doubted`
        ones last. Calls since the last look count as many tokens as a call had then; where an engine does not tell its
        load, all calls count alike."""
        admitted = self.admitted
        loads = [engine.load for engine in admitted]
        calls = sum(engine.calls_then for engine in admitted)
        tokens = 0 if None in loads else sum(load.live_tokens for load in loads if load is not None)
        call_tokens = tokens / calls if tokens and calls else 1.0

        def burden(engine: PooledEngine) -> float:
            if not tokens or engine.load is None:
                return len(engine.calls)
            return engine.load.live_tokens + (len(engine.calls) - engine.calls_then) * call_tokens

        return min(admitted, key=lambda engine: (engine in doubted, engine.index != preferred, burden(engine)))

    async def answered_badly(self, engine: PooledEngine | None, reason: str) -> None:
        """Count an invalid answer or an error of the engine, or of the router for None. After too many, quarantine the
        engine until it is verified again, after a pause at the earliest."""
        if engine is None:
            self.direct_until = time.monotonic() + DIRECT_S
            self._on_change(
                "bad_answer", engine=None, url=None if self.router is None else self.router.url, reason=reason
            )
            return
        self._on_change("bad_answer", engine=engine.index, url=engine.url, reason=reason)
        if engine.answers.bad():
            engine.try_at = engine.answers.until
            await self.quarantine(engine, f"{MOST_BAD} of its last {WINDOW} answers are bad, the last one: {reason}")

    async def mark_suspect(self, engine: PooledEngine | None, reason: str, oldest_allowed: int | None) -> None:
        """Quarantine the engine that failed. For None, a failure through the router, quarantine each engine that does
        not serve `oldest_allowed` or a later version."""
        if engine is not None:
            await self.quarantine(engine, reason)
            return
        self.router_is_suspect = self.router is None or not await self.router.ready()
        admitted = self.admitted
        serving = await all_of(serves(candidate, oldest_allowed) for candidate in admitted)
        for candidate, well in zip(admitted, serving, strict=True):
            if not well:
                await self.quarantine(candidate, reason)

    async def refused(self, engine: PooledEngine, error: FatalError) -> str:
        """Quarantine an engine whose server rejected a call, and return the reason: its address may be another server's
        by now. Raises as `check_refusals`, and `error` when the recipe names the URL and the server rejects a look too:
        then it is no engine, or has another key."""
        if self._membership.given:
            await look(engine)
            if engine.refusal is not None:
                raise error
        engine.refusal, engine.refused_at = error, min(engine.refused_at, time.monotonic())
        await self.quarantine(engine, str(error))
        self.check_refusals()
        return str(error)

    def check_refusals(self) -> None:
        """Raise an engine's refusal when all engines have refused for REFUSED_S: by then a dead engine would have been
        restarted, and its stale address forgotten."""
        if self._membership.given or not self.engines:
            return
        if all(time.monotonic() - one.refused_at >= REFUSED_S for one in self.engines):
            raise next(one.refusal for one in self.engines if one.refusal is not None)

    def lost(self, member: Member) -> str | None:
        """Return why waiting for this start of an engine is pointless; None while it is listed as well. Reads files."""
        if self._membership.given:
            return None
        listed = self.listed(member)
        return _LEFT if listed is None else listed.silent or None

    def listed(self, member: Member) -> Member | None:
        """Return the current announcement of this start of an engine; None where it is not listed. Reads files."""
        found = {one.index: one for one in self._listed.engines()}.get(member.index)
        return found if found == member else None

    def abandon(self, engine: PooledEngine, reason: str) -> None:
        """Cancel the engine's requests in flight, for a retry elsewhere. The router does not report where its requests
        run, so all requests through it are cancelled too."""
        _log.warning("engine %d at %s: requests in flight are abandoned: %s", engine.index, engine.url, reason)
        for call in [*engine.calls, *self.router_calls]:
            call.cancel()

    async def ask(self, engine: PooledEngine | None, call: Coroutine[Any, Any, T]) -> T:
        """Return the answer of the engine, or of the router for None. Raises EngineUnavailableError when abandoned."""
        calls = self.router_calls if engine is None else engine.calls
        task = asyncio.create_task(call)
        calls.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise EngineUnavailableError("the engine of this request is gone; it is asked elsewhere") from None
        finally:
            task.cancel()
            calls.discard(task)

    async def sync_router(self) -> None:
        """Give the router exactly the admitted engines: a restart or the learner's publish may have changed it."""
        if self.router is None:
            return
        wanted = {engine.url for engine in self.admitted}
        try:
            known = set(await self.router.workers())
            for url in wanted - known:
                await self.router.admit(url)
            for url in known - wanted:
                await self.router.remove(url)
            self.router_is_suspect = not (wanted and await self.router.ready())
            self._router_answered = time.monotonic()
        except (RetryableError, FatalError):  # it does not answer, or another server has its address
            self.router_is_suspect = True
            if time.monotonic() - self._router_answered > SILENCE_S:
                for call in self.router_calls:
                    call.cancel()

    async def _tell_router(self, engine: PooledEngine, *, admitted: bool) -> None:
        """Update the router, unless it is suspect. A silent router delays no caller: `sync_router` catches up."""
        if self.router is None or self.router_is_suspect:
            return
        try:
            await (self.router.admit(engine.url) if admitted else self.router.remove(engine.url))
        except (RetryableError, FatalError) as error:
            self.router_is_suspect = True
            _log.warning("the router is left aside: %s", error)

    async def close(self) -> None:
        clients = [self.router, self.entrance, *(engine.client for engine in self.engines)]
        await asyncio.gather(*(client.close() for client in clients if client is not None))


async def look(engine: PooledEngine) -> tuple[int | None, int | None]:
    """Return the verified version that an engine serves, and the version that it claims; None where there is none."""
    try:
        name = (await engine.client.model_info(LOOK_DEADLINE_S)).weight_version
    except RetryableError:
        return None, None
    except FatalError as error:
        engine.refusal, engine.refused_at = error, min(engine.refused_at, time.monotonic())
        return None, None
    engine.answered, engine.refusal, engine.refused_at = time.monotonic(), None, math.inf
    claimed, engine.asleep = claimed_version(name), name == ASLEEP
    engine.served = None if name.startswith(UNVERIFIED) else claimed
    return engine.served, claimed


async def weigh(engine: PooledEngine) -> None:
    """Look how much an engine has to do. What it does not answer in time remains as it was."""
    try:
        engine.load, engine.calls_then = await engine.client.load(LOOK_DEADLINE_S), len(engine.calls)
    except RetryableError:
        return
    except FatalError:  # a server without this route
        engine.load = None


async def serves(engine: PooledEngine, oldest_allowed: int | None) -> bool:
    """Return whether an engine answers now with a verified version of at least `oldest_allowed` (None: any version)."""
    served, _ = await look(engine)
    return served is not None and (oldest_allowed is None or served >= oldest_allowed)


WINDOW = 32
MOST_BAD = 3
"""A broken engine costs three requests. With one bad answer in a hundred, three among 32 occur in 0.4 % of windows."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0
DIRECT_S = 60.0
"""How long engines are asked directly after a bad answer through the router, to identify the engine at fault."""


ROUTING_DEADLINE_S = 10.0
"""Longest wait until the router has added or removed a worker, which it does in the background."""
NO_TOKENIZER = os.devnull
"""The router reads an unused tokenizer for each engine, from this path or, by default, from the engine's folder of
weights. Where that folder is gone, it would ask huggingface.co, whatever HF_HUB_OFFLINE says."""
_POLL_S = 0.05
_CALL_DEADLINE_S = 5.0


class RouterClient:
    """A client of a router's list of workers. Methods raise EngineUnavailableError when the router does not answer."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        self._api_key = api_key
        self._transport = Transport(url, api_key)

    async def workers(self) -> Mapping[str, str]:
        """Return engine URL → the router's id, for the engines that get its requests."""
        answer = await self._transport.call("GET", "/workers", deadline_s=_CALL_DEADLINE_S)
        try:
            listed = Workers.model_validate_json(answer.content).workers
        except ValidationError as error:
            raise EngineUnavailableError(f"{self.url}/workers answered something else than a router: {error}") from None
        return {worker.url.rstrip("/"): worker.id for worker in listed if worker.is_healthy}

    async def ready(self) -> bool:
        """Return whether the router answers and has an engine."""
        try:
            await self._transport.call("GET", "/readiness", deadline_s=_CALL_DEADLINE_S)
        except (EngineUnavailableError, FatalError):
            return False
        return True

    async def admit(self, engine_url: str) -> None:
        """Send requests to this engine too; return once the router does. A known engine stays as it is."""
        if engine_url in await self.workers():
            return
        request = {"url": engine_url, "api_key": self._api_key, "labels": {"tokenizer_path": NO_TOKENIZER}}
        await self._transport.call("POST", "/workers", deadline_s=_CALL_DEADLINE_S, json=request)
        await self._await_routing(engine_url, present=True)

    async def remove(self, engine_url: str) -> None:
        """Send this engine no more requests; return once the router does not."""
        worker_id = (await self.workers()).get(engine_url)
        if worker_id is None:
            return
        await self._transport.call("DELETE", f"/workers/{worker_id}", deadline_s=_CALL_DEADLINE_S, accept=(404,))
        await self._await_routing(engine_url, present=False)

    async def close(self) -> None:
        await self._transport.close()

    async def _await_routing(self, engine_url: str, *, present: bool) -> None:
        ends = time.monotonic() + ROUTING_DEADLINE_S
        while (engine_url in await self.workers()) != present:
            if time.monotonic() > ends:
                raise EngineUnavailableError(
                    f"router {self.url} did not {'add' if present else 'remove'} {engine_url} within "
                    f"{ROUTING_DEADLINE_S:g} s; see its log"
                )
            await asyncio.sleep(_POLL_S)


async def all_of(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all calls. No failure cancels another call: the first error is raised at the end."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def summarize(version: int, results: Sequence[dict[str, float] | str]) -> dict[str, float]:
    """Combine the results of a weight update: the sum of engines_checked, and the maximum of each other number. A
    result holds an engine's numbers, or the reason of its failure. Raises EngineUnavailableError when all failed."""
    taken = [result for result in results if isinstance(result, dict)]
    if not taken:
        raise EngineUnavailableError(
            f"no engine of {len(results)} took version {version}; {'; '.join(map(str, results))}"
        )
    total = {name: max(one[name] for one in taken) for name in taken[0]}
    return total | {"engines_checked": sum(one["engines_checked"] for one in taken)}
