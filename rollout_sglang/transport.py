"""Make one HTTP call to a server of ours: with a deadline, bounded retries, and errors of our tree."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

import httpx

from pipeline.errors import (
    BadAnswerError,
    EngineHungError,
    EngineUnavailableError,
    EngineVersionError,
    EvenKeelError,
    FatalError,
    RequestFailedError,
)
from precision.text import one_line, quoted
from rollout_sglang.server.update_fence import UPDATE_HEADER

CONNECT_ATTEMPTS = 3
FIRST_PAUSE_S = 0.1
"""Pause before the second attempt; doubles with each attempt."""
LOOK_DEADLINE_S = 4.0
"""For calls that an engine's HTTP process answers alone: health, version."""
SILENCE_S = 8.0
"""An engine that answers no such call for SILENCE_S counts as gone. A long prefill does not delay the answers."""
_LOOK_PAUSE_S = 1.0
MOST_BYTES = 1 << 20
"""Default limit of an answer: names, versions, states of an engine."""
_LENGTH_DIGITS = 18
REFUSAL_BYTES = 1 << 16
"""Limit of an answer that refuses the call; the rest is not read."""

T = TypeVar("T")
Lost = Callable[[], str | None]
"""A function that returns why waiting for a server is pointless; None while it is not. It reads files, in a thread."""
Take = Callable[[httpx.Response, AsyncIterator[bytes]], Awaitable[T]]
"""A reader of an answer, whose bytes come in parts; of the response only the status is set."""


_tls = cache(ssl.create_default_context)  # reading the machine's certificates takes longer than a call


class Transport:
    """JSON over HTTP to one server. Safe to use from several event loops in sequence: no connection is kept. (A kept
    connection belongs to the loop that opened it, and the server may close it at the moment of its use.)"""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        self.update: int | None = None
        """Number of the weight update that calls belong to (rollout_sglang.weights.update_lease)."""
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            timeout=None,  # `call` bounds the whole exchange
            trust_env=False,
            verify=_tls(),
        )

    async def call(
        self,
        method: str,
        path: str,
        *,
        deadline_s: float,
        json: Any = None,
        accept: tuple[int, ...] = (),
        repeatable: bool = True,
        most_bytes: int = MOST_BYTES,
    ) -> httpx.Response:
        """Return the whole answer, with a status of 200…299 or one in `accept`. Raises as `read` does."""

        async def whole(response: httpx.Response, parts: AsyncIterator[bytes]) -> httpx.Response:
            content = b"".join([part async for part in parts])
            return httpx.Response(response.status_code, content=content, request=response.request)

        options: dict[str, Any] = dict(json=json, accept=accept, repeatable=repeatable, most_bytes=most_bytes)
        return await self.read(method, path, whole, deadline_s=deadline_s, **options)

    async def glance(self, path: str, *, deadline_s: float) -> httpx.Response:
        """Return the answer to a GET that is repeated each second, for a fourth of what `call` costs. Anything but
        a short answer of status 200 over plain HTTP is asked for again by `call`. Raises as it does."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(deadline_s):
                content = await self._plain_get(path)
        except TimeoutError:
            raise _unanswered(f"GET {self.url}{path}", deadline_s) from None
        if content is None:
            left_s = max(0.0, deadline_s - (time.monotonic() - began))
            return await self.call("GET", path, deadline_s=left_s)
        return httpx.Response(200, content=content, request=httpx.Request("GET", f"{self.url}{path}"))

    async def _plain_get(self, path: str) -> bytes | None:
        """Return the answer to a GET, or None unless it is one that `glance` takes."""
        url = self._http.base_url
        sent = {"Host": url.netloc.decode(), "Connection": "close", "Accept-Encoding": "identity"}
        if key := self._http.headers.get("Authorization"):
            sent["Authorization"] = key
        lines = [f"GET {url.path.rstrip('/')}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items())]
        if url.scheme != "http" or not all(line.isascii() and line.isprintable() for line in lines):
            return None
        with suppress(OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            reader, writer = await asyncio.open_connection(url.host, url.port or 80)
            try:
                writer.write("\r\n".join([*lines, "", ""]).encode())
                head = await reader.readuntil(b"\r\n\r\n")
                status, *fields = head.decode("ascii").lower().split("\r\n")
                told = {name: value.strip() for name, _, value in (one.partition(":") for one in fields)}
                num_bytes, is_plain = int(told.get("content-length", -1)), "content-encoding" not in told
                if status.split(" ")[1:2] == ["200"] and is_plain and 0 <= num_bytes <= MOST_BYTES:
                    return await reader.readexactly(num_bytes)
            finally:
                writer.transport.abort()
                with suppress(OSError):
                    await writer.wait_closed()
        return None

    async def read(
        self,
        method: str,
        path: str,
        take: Take[T],
        *,
        deadline_s: float,
        json: Any = None,
        accept: tuple[int, ...] = (),
        repeatable: bool = True,
        most_bytes: int = MOST_BYTES,
    ) -> T:
        """Return `take`'s result for an answer with a status of 200…299 or one in `accept`, read while it arrives.

        Connections that break are tried again, with a new `take`, unless the call is not `repeatable`. Raises
        EngineUnavailableError when no usable answer arrives within `deadline_s`, RequestFailedError for the server's
        own error (5xx), BadAnswerError for an answer of more than `most_bytes`, EngineVersionError when a later weight
        update has overtaken this call's update (409), FatalError for a rejected request (other 4xx), and errors of
        `take`.
        """
        what, attempts = f"{method} {self.url}{path}", CONNECT_ATTEMPTS if repeatable else 1
        headers = {} if self.update is None else {UPDATE_HEADER: str(self.update)}
        try:
            async with asyncio.timeout(deadline_s):
                for attempt in range(1, attempts + 1):
                    try:
                        async with self._http.stream(method, path, json=json, headers=headers) as response:
                            if not response.is_success and response.status_code not in accept:
                                raise await _refusal(response)
                            return await take(response, _parts(response, most_bytes))
                    except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
                        if attempt == attempts:
                            raise EngineUnavailableError(
                                f"{what}: {type(error).__name__} {one_line(error, 300)} ({attempt} attempts); "
                                "see the log of the server"
                            ) from error
                        await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
        except TimeoutError:
            raise _unanswered(what, deadline_s) from None
        except httpx.LocalProtocolError:
            # httpx quotes the rejected header, which contains the key.
            raise EngineUnavailableError(
                f"{what} cannot be sent; is the API key printable ASCII without blanks?"
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineUnavailableError(
                f"{what}: {type(error).__name__} {one_line(error, 300)}; see the log of the server"
            ) from error
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def while_alive(self, call: Coroutine[Any, Any, T], lost: Lost = lambda: None) -> T:
        """Return the result of a call that may take minutes. Raises EngineHungError when the server answers nothing
        else meanwhile or `lost` returns a reason: a hung server costs seconds instead of the call's deadline."""
        task, answered = asyncio.create_task(call), time.monotonic()
        try:
            while not task.done():
                await asyncio.wait([task], timeout=_LOOK_PAUSE_S)
                if not task.done() and (reason := await asyncio.to_thread(lost)) is not None:
                    raise EngineHungError(f"{self.url}: {reason}")
                with suppress(EvenKeelError):
                    if not task.done():
                        await self.glance("/health", deadline_s=LOOK_DEADLINE_S)
                    answered = time.monotonic()
                if not task.done() and time.monotonic() - answered > SILENCE_S:
                    raise EngineHungError(
                        f"{self.url} has answered nothing for {SILENCE_S:g} s; its host or the network to it is gone"
                    )
            return await task
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def close(self) -> None:
        await self._http.aclose()


def _unanswered(what: str, deadline_s: float) -> EngineUnavailableError:
    return EngineUnavailableError(f"{what} got no answer within {deadline_s:g} s; the server hangs or is overloaded")


async def _parts(response: httpx.Response, most_bytes: int) -> AsyncIterator[bytes]:
    """Yield the bytes of an answer as they arrive. Raises BadAnswerError as soon as there are more than `most_bytes`,
    or when they are compressed: a few bytes could expand to gigabytes."""
    what = f"{response.request.method} {response.request.url}"
    if (encoding := response.headers.get("Content-Encoding", "identity").strip().lower()) not in ("identity", ""):
        raise BadAnswerError(f"{what} was answered in the encoding {quoted(encoding)}, which nobody asked for")
    declared = response.headers.get("Content-Length", "0")
    if not declared.isdecimal() or len(declared) > _LENGTH_DIGITS or int(declared) > most_bytes:
        raise BadAnswerError(f"{what} is answered by {quoted(declared)} bytes, expected at most {most_bytes}")
    count = 0
    async for part in response.aiter_raw():
        count += len(part)
        if count > most_bytes:
            raise BadAnswerError(f"{what} is answered by more than {most_bytes} bytes; the rest is not read")
        yield part


async def _refusal(response: httpx.Response) -> EvenKeelError:
    """Return the error for an answer that refuses its call, with the beginning of the answer's text."""
    beginning = bytearray()
    async for part in response.aiter_raw():
        beginning += part
        if len(beginning) >= REFUSAL_BYTES:
            break
    request = response.request
    said = one_line(beginning[:REFUSAL_BYTES].decode("utf-8", "replace"), 400)
    what = f"{request.method} {request.url} answered {response.status_code}: {said}"
    if response.status_code in (401, 403):
        return FatalError(f"{what}; the server was started with another API key")
    if response.status_code == 409:
        return EngineVersionError(what)
    if response.status_code >= 500:
        return RequestFailedError(f"{what}; see the log of the server")
    if response.status_code < 400 or response.status_code in (408, 429):
        return EngineUnavailableError(f"{what}; see the log of the server")
    return FatalError(f"{what}; the request itself seems wrong, for example longer than rollout.context_tokens")
