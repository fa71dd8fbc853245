"""Engines of the tiny model, one for each precision, which the tests of a session share.

A file of tests leases engines at its start. It gets them with the weights of version 0, under that name, and scoring
rows exactly as they did when they were new: what another file did to them is gone, or the lease fails.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.config.sections import RolloutPrecision
from precision.formats.rollout_format import RolloutFormat
from rollout_sglang.client import EngineClient
from rollout_sglang.server.start import EngineSpec, ServerProcess, free_port
from rollout_sglang.weights.update_lease import fresh_number
from tests.doubles.tiny_model import reference_logprobs, reference_model, write_block_checkpoint, write_checkpoint
from tests.support.engine_forks import start_engine

T = TypeVar("T")
KEY = "a-key-of-the-tests"
START_DEADLINE_S = 300.0
ROWS = [[random.Random(row).randrange(256) for _ in range(24)] for row in range(4)]
FORMATS: dict[RolloutPrecision, RolloutFormat | None] = {
    "fp32": None,
    "fp8_tensor": RolloutFormat.FP8_TENSOR,
    "fp8_block": RolloutFormat.FP8_BLOCK,
}


@dataclass(frozen=True)
class TinyEngine:
    """A running server, and the transformers model that should agree with it at version 0 and at version 1."""

    process: ServerProcess
    spec: EngineSpec
    checkpoints: tuple[Path, Path]
    """As the engine loads them."""
    full_precision: tuple[Path, Path]
    rollout_format: RolloutFormat | None

    def ask(self, call: Callable[[EngineClient], Awaitable[T]], key: str = KEY, *, keeps_kv: bool = False) -> T:
        """What one call of a client answers."""

        async def main() -> T:
            update = fresh_number()
            client = EngineClient(self.spec.url, key, index=0, request_deadline_s=120, update=update, keeps_kv=keeps_kv)
            try:
                return await call(client)
            finally:
                await client.close()

        return asyncio.run(main())

    def load(self, version: int) -> None:
        """Take the weights of a version."""
        self.ask(lambda client: load(client, version, self.checkpoints[version]))

    def scores(self) -> list[NDArray[np.float32]]:
        """What the engine thinks of ROWS."""
        return self.ask(lambda client: client.prompt_logprobs(ROWS))

    def expected(self, version: int) -> list[NDArray[np.float32]]:
        """What transformers thinks of ROWS."""
        model = reference_model(self.full_precision[version], self.rollout_format)
        return [reference_logprobs(model, row) for row in ROWS]


async def load(client: EngineClient, version: int, directory: Path) -> None:
    """Believe the engine what it was given; tests/integration/test_weight_check.py does not."""
    await client.pause()
    try:
        await client.update_from_disk(version, directory, deadline_s=60)
        await client.name(version)
    finally:
        await client.resume()


async def under_way(request: Coroutine[Any, Any, T], log: Path) -> asyncio.Task[T]:
    """The request, once its engine has decoded tokens of it."""
    before = num_decodes(log)
    task = asyncio.create_task(request)
    await asyncio.to_thread(wait_for_decode, log, before)
    return task


def num_decodes(log: Path) -> int:
    """How many steps of decoding an engine has reported in its log."""
    return log.read_text(errors="replace", encoding="utf-8").count("Decode batch")


def wait_for_decode(log: Path, before: int, deadline_s: float = 60.0) -> None:
    """Until the engine has decoded tokens of a request that came when there were `before` reports."""
    give_up = time.monotonic() + deadline_s
    while num_decodes(log) <= before:
        assert time.monotonic() < give_up, f"nothing was decoded within {deadline_s:g} s"
        time.sleep(0.01)


class TinyEngines:
    """The engines of a session, each started when it is first leased."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.plain = (write_checkpoint(root / "a", 0), write_checkpoint(root / "b", 1))
        self.block = tuple(write_block_checkpoint(path, root / f"{path.name}_fp8") for path in self.plain)
        self._running: dict[RolloutPrecision, TinyEngine] = {}
        self._new_scores: dict[RolloutPrecision, list[NDArray[np.float32]]] = {}

    def lease(self, precisions: Sequence[RolloutPrecision]) -> dict[RolloutPrecision, TinyEngine]:
        """Engines that serve version 0; one that has ended is started again."""
        missing = [
            one for one in precisions if one not in self._running or self._running[one].process.poll() is not None
        ]
        self._running |= {precision: self._start(precision) for precision in missing}
        for precision in missing:
            self._running[precision].process.wait_ready(START_DEADLINE_S)
        for precision in precisions:
            self._reset(precision)
        return {precision: self._running[precision] for precision in precisions}

    def close(self) -> None:
        """End them all."""
        for engine in self._running.values():
            engine.process.kill()

    def _start(self, precision: RolloutPrecision) -> TinyEngine:
        checkpoints = self.block if precision == "fp8_block" else self.plain
        spec = EngineSpec(
            model=checkpoints[0],
            port=free_port(),
            precision=precision,
            dtype="float32",
            log=self.root / f"{precision}.log",
            version=0,
            api_key=KEY,
            metrics=True,
        )
        return TinyEngine(start_engine(spec), spec, (checkpoints[0], checkpoints[1]), self.plain, FORMATS[precision])

    def _reset(self, precision: RolloutPrecision) -> None:
        engine = self._running[precision]
        engine.load(0)
        scores = engine.scores()
        new = self._new_scores.setdefault(precision, scores)
        assert engine.ask(lambda client: client.model_info()).weight_version == "0"
        for before, now in zip(new, scores, strict=True):
            np.testing.assert_allclose(now, before, atol=1e-6, err_msg=f"the {precision} engine is not as it was")
