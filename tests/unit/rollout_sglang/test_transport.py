"""What a call says of a key that cannot be sent, and glances that cost little."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest

from pipeline.errors import EngineUnavailableError, FatalError, RequestFailedError
from rollout_sglang.transport import Transport
from tests.doubles.sglang_double import EngineDouble


def test_a_key_that_no_header_can_hold_is_not_quoted() -> None:
    """httpx quotes the header, when it has reached a server."""

    async def ask(url: str) -> None:
        transport = Transport(url, "hunter2\r")
        try:
            await transport.call("GET", "/model_info", deadline_s=5.0)
        finally:
            await transport.close()

    with EngineDouble() as engine, pytest.raises(EngineUnavailableError, match=r"cannot be sent.*API key") as raised:
        asyncio.run(ask(engine.url))
    assert "hunter2" not in str(raised.value)
    assert raised.value.__suppress_context__, "nor is what httpx said printed below it"


class Scripted(EngineDouble):
    """Answers each request with the next of `given`, sent as it is; the last one stays."""

    def __init__(self, *given: tuple[int, Any] | None) -> None:
        super().__init__()
        self.given = [*given]
        self.asked = list[tuple[str, str | None]]()

    def answer(self, method: str, path: str, request: Any, headers: Mapping[str, str]) -> tuple[int, Any] | None:
        self.asked.append((f"{method} {path}", headers.get("Authorization")))
        return self.given.pop(0) if len(self.given) > 1 else self.given[0]


def glance(*given: tuple[int, Any] | None, key: str | None = None, deadline_s: float = 5.0) -> tuple[bytes, Scripted]:
    async def ask(url: str) -> bytes:
        transport = Transport(f"{url}/below", key)
        try:
            return (await transport.glance("/model_info", deadline_s=deadline_s)).content
        finally:
            await transport.close()

    with Scripted(*given) as engine:
        return asyncio.run(ask(engine.url)), engine


def test_a_glance_is_one_request_with_the_key() -> None:
    content, engine = glance((200, {"weight_version": "7"}), key="secret")
    assert content == b'{"weight_version": "7"}'
    assert engine.asked == [("GET /below/model_info", "Bearer secret")]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ((401, {}), FatalError, "another API key"),
        ((500, {}), RequestFailedError, "answered 500"),
        (None, EngineUnavailableError, "3 attempts"),
    ],
)
def test_what_is_wrong_at_a_glance_is_told_as_by_a_call(given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        glance(given)


def test_a_connection_that_broke_at_a_glance_is_tried_again() -> None:
    content, engine = glance(None, (200, {}))
    assert content == b"{}"
    assert len(engine.asked) == 2


def test_an_answer_that_is_too_long_for_a_glance_is_refused() -> None:
    with pytest.raises(EngineUnavailableError, match="expected at most 1048576"):
        glance((200, b"x" * (1 << 20 | 1)))


def test_a_silent_server_is_not_asked_twice() -> None:
    """Its deadline would pass twice."""

    async def ask() -> int:
        connections = list[asyncio.StreamWriter]()

        def say_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(writer)

        async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as server:
            transport = Transport("http://{}:{}".format(*server.sockets[0].getsockname()), None)
            with pytest.raises(EngineUnavailableError, match=r"no answer within 0\.5 s"):
                await transport.glance("/health", deadline_s=0.5)
            for writer in connections:
                writer.transport.abort()
                with suppress(OSError):
                    await writer.wait_closed()
        return len(connections)

    assert asyncio.run(ask()) == 1
