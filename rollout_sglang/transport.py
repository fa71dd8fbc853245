"""One HTTP call to a server of ours: deadline, bounded retries, errors of our tree."""

from __future__ import annotations

import asyncio
import ssl
from functools import cache
from typing import Any

import httpx

from pipeline.errors import EngineUnavailableError, FatalError

CONNECT_ATTEMPTS = 3
FIRST_PAUSE_S = 0.1
"""Before the second attempt; doubles with each one."""


@cache
def _tls() -> ssl.SSLContext:
    """Cached, because reading the certificates of the machine takes longer than a call."""
    return ssl.create_default_context()


class Transport:
    """JSON over HTTP to one server. Safe to use from several event loops one after the other: no connection is kept.

    (A kept connection belongs to the loop that opened it, and may be closed by the server at the moment it is used.)
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
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
    ) -> httpx.Response:
        """Answer with a status of 200…299 or one in `accept`.

        Connections that break are tried again, unless the call is not `repeatable`.
        Raises EngineUnavailableError when no usable answer arrives within `deadline_s`, FatalError when the server
        refuses the request itself (4xx).
        """
        try:
            async with asyncio.timeout(deadline_s):
                response = await self._send(method, path, json, CONNECT_ATTEMPTS if repeatable else 1)
        except TimeoutError:
            raise EngineUnavailableError(
                f"{method} {self.url}{path} got no answer within {deadline_s:g} s; the server hangs or is overloaded"
            ) from None
        if response.is_success or response.status_code in accept:
            return response
        raise _refusal(response)

    async def _send(self, method: str, path: str, json: Any, attempts: int) -> httpx.Response:
        for attempt in range(1, attempts + 1):
            try:
                return await self._http.request(method, path, json=json)
            except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
                if attempt == attempts:
                    raise EngineUnavailableError(
                        f"{method} {self.url}{path}: {type(error).__name__} {error} ({attempt} attempts); "
                        "see the log of the server"
                    ) from error
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def close(self) -> None:
        """Release the connections."""
        await self._http.aclose()


def _refusal(response: httpx.Response) -> EngineUnavailableError | FatalError:
    request = response.request
    what = f"{request.method} {request.url} answered {response.status_code}: {' '.join(response.text.split())[:500]}"
    if response.status_code in (401, 403):
        return FatalError(f"{what}; the server was started with another API key")
    if response.status_code >= 500 or response.status_code in (408, 429):
        return EngineUnavailableError(f"{what}; see the log of the server")
    return FatalError(f"{what}; the request itself is wrong, for example longer than rollout.context_tokens")
