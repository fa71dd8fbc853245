"""Guard SGLang's HTTP server: require the API key, and refuse weight updates that a newer update has overtaken.

    open     health, readiness, metrics: for probes, without a key
    free     sampling, scoring, reading: with the key
    fenced   all other paths, unknown ones included: with the key, and with an update's number in the header
             X-EvenKeel-Update that is not lower than the highest number seen

A refusal is 409 with {"success": false, "message": …}. A call with a higher number waits until the admitted calls with
lower numbers have ended, so that a load under way cannot end in the middle of its successor's.

SGLang checks its key itself, but neither for websockets nor for paths that begin like the paths of probes. Needs only
the standard library (and Starlette's protocol): it runs in the interpreter of the engines.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Literal

UPDATE_HEADER = "X-EvenKeel-Update"
FLOOR_VARIABLE = "EVENKEEL_UPDATE_FLOOR"
"""The newest update number when the engine started: a restarted engine has lost the numbers that it had seen."""
DRAIN_DEADLINE_S = 5.0
"""Longest wait of a call for the calls of an earlier update. After it, the sender leaves the engine out."""

Access = Literal["open", "free", "fenced"]
OPEN = frozenset({"/health", "/ready", "/metrics", "/metrics/"})
FREE = frozenset(
    {
        "/generate",
        "/encode",
        "/classify",
        "/tokenize",
        "/detokenize",
        "/v1/tokenize",
        "/v1/detokenize",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/classify",
        "/v1/score",
        "/v1/rerank",
        "/v1/decisions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/audio/transcriptions",
        "/v1/models",
        "/v1/loads",
        "/get_load",
        "/health_generate",
        "/model_info",
        "/get_model_info",
        "/server_info",
        "/get_server_info",
        "/ping",
        "/openapi.json",
        "/parse_function_call",
        "/separate_reasoning",
        "/freeze_gc",  # SGLang calls it once, after its warm-up; it touches no weights
    }
)
_SERVED_BY_APP = dict(tokenizer_worker_num=1, grpc_mode=False, smg_grpc_mode=False, grpc_port=None, encoder_only=False)
"""SGLang's arguments with which a single process serves HTTP, by SGLang's usual application."""
FREE_BELOW = ("/v1/models/", "/v1/responses/")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def access(path: str) -> Access:
    """Return the access class of a path. An unknown path is fenced."""
    if path in OPEN:
        return "open"
    if path in FREE or path.startswith(FREE_BELOW):
        return "free"
    return "fenced"


class Fence:
    """The updates that an engine admits: the highest number seen, and the calls at work for each number."""

    def __init__(self, floor: int = 0) -> None:
        self.highest = floor
        self._at_work: list[int] = []
        self._ended = asyncio.Event()

    async def enter(self, number: int | None) -> str | None:
        """Begin a call. Return None if it may go on, else the reason for refusing it. `leave` ends an admitted call."""
        if number is None:
            return f"this call needs the number of a weight update in the header {UPDATE_HEADER}; begin an update"
        overtaken = "weight update {} was overtaken by {}; this process must not change the weights any more"
        if number < self.highest:
            return overtaken.format(number, self.highest)
        self.highest = number
        try:
            async with asyncio.timeout(DRAIN_DEADLINE_S):
                while any(earlier < number for earlier in self._at_work):
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            return f"a call of an update before {number} is still at work here; leave this engine out, or try again"
        if number < self.highest:
            return overtaken.format(number, self.highest)
        self._at_work.append(number)
        return None

    def leave(self, number: int) -> None:
        self._at_work.remove(number)
        self._ended.set()


class UpdateFence:
    """ASGI middleware around SGLang's application."""

    def __init__(self, app: App, *, key: str | None, floor: int) -> None:
        self._app = app
        self._key = key
        self._fence = Fence(floor)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        needs: Access = "open"
        if scope["type"] in ("http", "websocket"):
            # The path that Starlette matches routes with (starlette._utils.get_route_path).
            path, root = str(scope["path"]), str(scope.get("root_path") or "")
            needs = access(path.removeprefix(root) if root and path.startswith(f"{root}/") else path)
            kind, _, key = _header(scope, b"authorization").partition(b" ")
            has_key = kind.lower() == b"bearer" and secrets.compare_digest(key, (self._key or "").encode())
            if needs != "open" and self._key and not has_key:
                await _refuse(scope, receive, send, 401, "the API key is missing or wrong")
                return
        if needs != "fenced" or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        text = _header(scope, UPDATE_HEADER.lower().encode())
        number = int(text) if text.isdigit() and len(text) < 20 else None
        refusal = await self._fence.enter(number)
        if number is None or refusal is not None:
            await _refuse(scope, receive, send, 409, refusal or "")
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._fence.leave(number)


def install(key: str | None) -> None:
    """Put the fence in front of the server that this process will run. Exit the process if that fails: anyone could
    change the weights of an engine without a fence."""
    try:
        from sglang.srt.entrypoints import http_server

        http_server.app.add_middleware(UpdateFence, key=key, floor=int(os.environ.get(FLOOR_VARIABLE) or 0))
    except (ImportError, AttributeError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("sglang"):
            raise SystemExit(
                f"error: SGLang needs {error.name}, which {sys.executable} lacks; pip install {error.name} there"
            ) from error
        raise SystemExit(
            f"the fence of weight updates cannot be put in front of this release of SGLang ({error}); use a release "
            "that Even Keel supports, or tell us"
        ) from error


def check_arguments(server_args: Any) -> None:
    """Exit the process when SGLang would serve HTTP by any application other than the fenced one."""
    wrong = [name for name, allowed in _SERVED_BY_APP.items() if getattr(server_args, name, allowed) != allowed]
    if os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true", "yes", "y"):
        wrong.append("SGLANG_RUST_SERVER")
    if wrong:
        raise SystemExit(
            f"SGLang was started with {', '.join(wrong)}: it would serve past the fence of weight updates; leave it "
            "out of rollout.extra_args"
        )


def _header(scope: Scope, name: bytes) -> bytes:
    """Return the value of a header that is present once or with equal values: SGLang's router repeats the key."""
    found = {bytes(value) for key, value in scope["headers"] if key.lower() == name}
    return found.pop() if len(found) == 1 else b""


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int, message: str) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008})
        return
    body = json.dumps({"success": False, "message": message}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
