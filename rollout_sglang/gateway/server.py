"""Serve the policy to agents that only know a base URL: OpenAI's chat completions and Anthropic's messages.

    agent ──base URL, key of its episode──▶ gateway ──▶ Session.turn ──▶ engines

A key opens one episode. An answer is recorded in its episode before the first byte of it is sent. An agent's library
asks again when a connection breaks: such a request gets the answer to the first one, and no second turn is sampled.
The server listens on the loopback address.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pipeline.data.batch import StopReason
from pipeline.episodes.episode import EpisodeEndedError, Session, Turn
from pipeline.errors import RetryableError
from precision.text import one_line
from rollout_sglang.gateway.messages import (
    Asked,
    anthropic_answer,
    anthropic_stream,
    openai_answer,
    openai_stream,
    read_anthropic,
    read_openai,
)

MAX_REQUEST_BYTES = 64 * 2**20
_START_S = 30.0
_END_S = 5
_KEEP_ALIVE_S = 3600
"""A connection stays open while an agent runs its tools: closing it would break a request on its way."""


@dataclass(eq=False)
class _Open:
    """An episode that agents may reach."""

    session: Session
    answers: dict[str, _Answer] = field(default_factory=dict)
    """Digest of a request → its newest answer."""


@dataclass(eq=False)
class _Answer:
    task: asyncio.Task[Turn]
    name: str | None
    """The Idempotency-Key of the request."""
    is_delivered: bool = False


@dataclass(frozen=True, kw_only=True)
class _Protocol:
    read: Callable[[Any], Asked]
    answer: Callable[[Asked, Turn, str], dict[str, Any]]
    stream: Callable[[Asked, Turn, str], Iterator[str]]
    error: Callable[[str, str], dict[str, Any]]


_OPENAI = _Protocol(
    read=read_openai,
    answer=openai_answer,
    stream=openai_stream,
    error=lambda kind, text: {"error": dict(message=text, type=kind, param=None, code=kind)},
)
_ANTHROPIC = _Protocol(
    read=read_anthropic,
    answer=anthropic_answer,
    stream=anthropic_stream,
    error=lambda kind, text: {"type": "error", "error": dict(type=kind, message=text)},
)


class Gateway:
    """An async context manager of the server, in the event loop of the collector."""

    def __init__(self) -> None:
        self.url = ""
        self.ignored: Counter[str] = Counter()
        """Setting of requests → how often it was ignored."""
        self._open: dict[str, _Open] = {}
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def open(self, session: Session) -> str:
        """Return the key of a session."""
        key = f"ek-{secrets.token_urlsafe(24)}"
        self._open[key] = _Open(session)
        return key

    def close(self, key: str) -> None:
        """Refuse the key from now on, and cancel what is asked with it."""
        for answer in self._open.pop(key).answers.values():
            answer.task.cancel()

    async def __aenter__(self) -> Self:
        routes = [
            Route("/v1/chat/completions", self._route(_OPENAI), methods=["POST"]),
            Route("/v1/messages", self._route(_ANTHROPIC), methods=["POST"]),
            Route("/v1/messages/count_tokens", self._count, methods=["POST"]),
            Route("/v1/models", self._models),
        ]
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        config = uvicorn.Config(
            Starlette(routes=routes),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_END_S,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve([listening]))
        async with asyncio.timeout(_START_S):
            while not self._server.started:
                await asyncio.sleep(0.005)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        assert self._serving is not None
        for key in list(self._open):
            self.close(key)
        self._server.should_exit = True
        await self._serving

    def _route(self, protocol: _Protocol) -> Callable[[Request], Any]:
        async def handle(request: Request) -> Response:
            found = self._found(request)
            if found is None:
                return _refused(protocol, 401, "authentication_error", "the key opens no episode: it is wrong, or over")
            try:
                body = await _body(request)
                asked = protocol.read(json.loads(body))
            except (ValueError, RecursionError) as error:
                return _refused(protocol, 400, "invalid_request_error", one_line(error, 500))
            self.ignored.update(asked.ignored)
            answer = self._answer(found, asked, body, request)
            try:
                turn = await asyncio.shield(answer.task)
            except EpisodeEndedError as error:
                if error.reason is StopReason.CONTEXT:
                    return _refused(protocol, 400, "context_length_exceeded", str(error))
                return _refused(protocol, 403, "episode_ended", str(error))
            except ValueError as error:
                return _refused(protocol, 400, "invalid_request_error", one_line(error, 500))
            except RetryableError as error:
                return _refused(protocol, 503, "overloaded_error", str(error))
            except asyncio.CancelledError:
                if answer.task.cancelled():
                    return _refused(protocol, 403, "episode_ended", "the episode has ended")
                raise
            answer.is_delivered = not await request.is_disconnected()
            number = hashlib.sha256(body).hexdigest()[:24]
            if asked.stream:
                return StreamingResponse(protocol.stream(asked, turn, number), media_type="text/event-stream")
            return JSONResponse(protocol.answer(asked, turn, number))

        return handle

    def _answer(self, found: _Open, asked: Asked, body: bytes, request: Request) -> _Answer:
        """Return the answer of the first such request to a retry, else a new one. A retry says so (as OpenAI's and
        Anthropic's libraries do), has the Idempotency-Key of the first, or comes while the first is unanswered, or
        after its connection broke."""
        digest, name = hashlib.sha256(body).hexdigest(), request.headers.get("idempotency-key")
        earlier = found.answers.get(digest)
        if earlier is not None and not (earlier.task.done() and (earlier.task.cancelled() or earlier.task.exception())):
            says_so = request.headers.get("x-stainless-retry-count", "0") != "0"
            if says_so or not earlier.is_delivered or (name is not None and name == earlier.name):
                return earlier
        task = asyncio.create_task(found.session.turn(asked.messages, asked.tools))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, also where nobody waits
        found.answers[digest] = _Answer(task, name)
        return found.answers[digest]

    def _found(self, request: Request) -> _Open | None:
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        key = token.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
        return self._open.get(key)

    async def _count(self, request: Request) -> Response:
        found = self._found(request)
        if found is None:
            return _refused(_ANTHROPIC, 401, "authentication_error", "the key opens no episode: it is wrong, or over")
        try:
            asked = read_anthropic(json.loads(await _body(request)))
            return JSONResponse(dict(input_tokens=found.session.count(asked.messages, asked.tools)))
        except (ValueError, RecursionError) as error:
            return _refused(_ANTHROPIC, 400, "invalid_request_error", one_line(error, 500))

    async def _models(self, request: Request) -> Response:
        if self._found(request) is None:
            return _refused(_OPENAI, 401, "authentication_error", "the key opens no episode: it is wrong, or over")
        policy = dict(id="policy", object="model", created=0, owned_by="evenkeel", type="model", display_name="policy")
        return JSONResponse(dict(object="list", data=[policy], has_more=False, first_id="policy", last_id="policy"))


async def _body(request: Request) -> bytes:
    """Return the body of a request. Raises ValueError for one that is too long."""
    pieces, size = list[bytes](), 0
    async for piece in request.stream():
        size += len(piece)
        if size > MAX_REQUEST_BYTES:
            raise ValueError(f"the request has more than {MAX_REQUEST_BYTES} bytes; send less of the conversation")
        pieces.append(piece)
    return b"".join(pieces)


def _refused(protocol: _Protocol, status: int, kind: str, text: str) -> Response:
    return JSONResponse(protocol.error(kind, text), status)


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals to the collector."""
        yield
