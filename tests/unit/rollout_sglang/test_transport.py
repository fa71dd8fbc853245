"""What a call says of a key that cannot be sent."""

from __future__ import annotations

import asyncio

import pytest

from pipeline.errors import EngineUnavailableError
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
