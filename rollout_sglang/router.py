"""SGLang's router: which engines it sends requests to, and how to change that while it runs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping

from pydantic import ValidationError

from pipeline.errors import EngineUnavailableError, FatalError
from rollout_sglang.protocol import Workers
from rollout_sglang.transport import Transport

ROUTING_DEADLINE_S = 10.0
"""Longest wait until the router has added or removed a worker, which it does in the background."""
NO_TOKENIZER = os.devnull
"""The router reads a tokenizer for each engine, and nobody uses it: from this path or, without one, from the engine's
folder of weights. Where that is gone by then, it would ask huggingface.co for it, whatever HF_HUB_OFFLINE says."""
_POLL_S = 0.05
_CALL_DEADLINE_S = 5.0


class RouterClient:
    """Membership of a running router. Methods raise EngineUnavailableError when the router does not answer."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        self._api_key = api_key
        self._transport = Transport(url, api_key)

    async def workers(self) -> Mapping[str, str]:
        """Engine URL → the router's id, for engines that it sends requests to."""
        answer = await self._transport.call("GET", "/workers", deadline_s=_CALL_DEADLINE_S)
        try:
            listed = Workers.model_validate_json(answer.content).workers
        except ValidationError as error:
            raise EngineUnavailableError(f"{self.url}/workers answered something else than a router: {error}") from None
        return {worker.url.rstrip("/"): worker.id for worker in listed if worker.is_healthy}

    async def ready(self) -> bool:
        """Whether the router answers and has an engine to send requests to."""
        try:
            await self._transport.call("GET", "/readiness", deadline_s=_CALL_DEADLINE_S)
        except (EngineUnavailableError, FatalError):
            return False
        return True

    async def admit(self, engine_url: str) -> None:
        """Send requests to this engine too; returns once the router does. An engine that is known stays as it is."""
        if engine_url in await self.workers():
            return
        request = {"url": engine_url, "api_key": self._api_key, "labels": {"tokenizer_path": NO_TOKENIZER}}
        await self._transport.call("POST", "/workers", deadline_s=_CALL_DEADLINE_S, json=request)
        await self._await_routing(engine_url, present=True)

    async def remove(self, engine_url: str) -> None:
        """Send this engine no more requests; returns once the router does not."""
        worker_id = (await self.workers()).get(engine_url)
        if worker_id is None:
            return
        await self._transport.call("DELETE", f"/workers/{worker_id}", deadline_s=_CALL_DEADLINE_S, accept=(404,))
        await self._await_routing(engine_url, present=False)

    async def close(self) -> None:
        """Release the connections."""
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
