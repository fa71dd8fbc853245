"""Run one engine for a run without a collector, for tools that compare it with a learner."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from launch.build.engines import engine_spec
from pipeline.config.recipe import Recipe
from pipeline.data.run_directory import RunDirectory
from pipeline.ports.weights import ComingCheck, WeightCheck, verify_policy
from rollout_sglang.client import EngineClient
from rollout_sglang.server import start as server
from rollout_sglang.server.start import ServerProcess, free_port
from rollout_sglang.weight_verifier import WeightVerifier
from rollout_sglang.weights.update_lease import fresh_number


class OneEngine:
    """An engine that serves the newest version of a run, verified, as a context manager."""

    def __init__(self, run: RunDirectory, recipe: Recipe) -> None:
        self.recipe, self.run, self.key, self.port = recipe, run, secrets.token_hex(16), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: ServerProcess | None = None

    def __enter__(self) -> Self:
        """Start the server and verify its weights. Raises EngineStartError, EngineVersionError."""
        spec = engine_spec(self.run, self.recipe, 0, self.port, self.key, log=self.run.logs / "engine-0.log")
        verify_policy(spec.model, spec.version, "publish the version again, or take another run")
        self.process = server.start(spec)
        try:
            self.process.wait_ready(self.recipe.rollout.start_deadline_s)
            asyncio.run(self.verify())
        except BaseException:
            self.process.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None:
            self.process.stop()

    def client(self) -> EngineClient:
        """Return a new client for the caller's event loop. The caller closes it."""
        return EngineClient(self.url, self.key, index=0, request_deadline_s=self.recipe.rollout.request_deadline_s)

    async def verify(self) -> None:
        """Verify that the engine holds the version that it started with; only then does it report a version."""
        version = self.run.newest_policy(self.run.published_version())
        client = self.client()
        client.take_part(fresh_number())
        try:
            verifier = WeightVerifier(self.recipe.weights.publish_deadline_s)
            check = ComingCheck.known(version, WeightCheck.load(self.run.policy_directory(version), version))
            await verifier.verify(client, version, check)
        finally:
            await client.close()

    async def prefill(self, rows: Sequence[Sequence[int]]) -> list[NDArray[np.float64]]:
        """Return the float64 logprobs of tokens 1 … n-1 of each row, at temperature 1."""
        client = self.client()
        try:
            return [np.asarray(row, np.float64) for row in await client.prompt_logprobs(rows)]
        finally:
            await client.close()
