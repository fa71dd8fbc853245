"""What a server refuses for a moment is asked again, after pauses that grow."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

_FIRST_PAUSE_S = 0.5
_ON_THE_WAY = frozenset(
    (
        *(("aiohttp", name) for name in ("ClientConnectionError", "ClientPayloadError")),
        *((client, "APIConnectionError") for client in ("anthropic", "openai")),
        *(("httpcore", name) for name in ("NetworkError", "TimeoutException", "RemoteProtocolError")),
        ("httpx", "TransportError"),
        *(("requests", name) for name in ("ConnectionError", "Timeout", "ChunkedEncodingError")),
        ("urllib", "URLError"),
        *(("urllib3", name) for name in ("MaxRetryError", "ProtocolError", "TimeoutError")),
    )
)
"""(package, class) of errors that say that the way to a server failed. Others of these packages, such as an address
that is none or a missing key, would come again."""


def may_pass(error: Exception) -> bool:
    """Whether to ask again: a connection that failed, or an answer 408, 429 or 5xx. A mistake in the function, and any
    other answer, would come again."""
    if isinstance(error.__cause__ or error.__context__, PermissionError) or isinstance(error, PermissionError):
        return False  # the sandbox
    response = getattr(error, "response", None)
    for status in (getattr(response, "status_code", None), *(getattr(error, n, None) for n in ("status", "code"))):
        if isinstance(status, int):
            return status in (408, 429) or status >= 500
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__}
    return isinstance(error, ConnectionError | TimeoutError) or bool(kinds & _ON_THE_WAY)


def retried(call: Callable[[], Any], retries: int) -> Any:
    """What `call` returns in the end. Raises what it raises last."""
    for pause_s in _pauses(retries):
        try:
            return call()
        except Exception as error:
            if not may_pass(error):
                raise
            time.sleep(pause_s)
    return call()


async def retried_async(call: Callable[[], Awaitable[Any]], retries: int) -> Any:
    """`retried`, of an async function."""
    for pause_s in _pauses(retries):
        try:
            return await call()
        except Exception as error:
            if not may_pass(error):
                raise
            await asyncio.sleep(pause_s)
    return await call()


def _pauses(retries: int) -> Iterator[float]:
    """Seconds; twice as long each time, and of random length, so that samples do not ask again in step."""
    for number in range(retries):
        yield _FIRST_PAUSE_S * 2**number * random.uniform(0.5, 1.0)
