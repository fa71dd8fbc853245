"""A real SGLang server on a mixture of experts: it scores and samples as transformers does, before and after an update.

The block-quantized server of dense models is in test_engine.py; SGLang has no FP8 experts on a CPU.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from launch.convert.new_model import new_model
from pipeline.ports.engines import Sampling
from rollout_sglang.client import EngineClient
from rollout_sglang.server.start import EngineSpec, free_port
from rollout_sglang.weights.update_lease import fresh_number
from tests.doubles.tiny_model import reference_logprobs, reference_model
from tests.support.engine_forks import start_engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

T = TypeVar("T")
ROWS = [[random.Random(row).randrange(46) for _ in range(24)] for row in range(4)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("experts")
    for seed in (0, 1):
        new_model(root / str(seed), experts=8, experts_per_token=2, expert_ffn=96, seed=seed)
    return [root / "0", root / "1"]


@pytest.fixture(scope="module")
def ask(folders: list[Path]) -> Iterator[Callable[[Callable[[EngineClient], Awaitable[T]]], T]]:
    spec = EngineSpec(
        model=folders[0],
        port=free_port(),
        precision="fp32",
        dtype="float32",
        log=folders[0].parent / "engine.log",
        version=0,
    )
    process = start_engine(spec)

    def call(question: Callable[[EngineClient], Awaitable[T]]) -> T:
        async def main() -> T:
            client = EngineClient(spec.url, None, index=0, request_deadline_s=120, update=fresh_number())
            try:
                return await question(client)
            finally:
                await client.close()

        return asyncio.run(main())

    try:
        process.wait_ready(300.0)
        yield call
    finally:
        process.kill()


async def load(client: EngineClient, version: int, folder: Path) -> None:
    """Name what the engine was given without a check: those are for tests/integration/test_weight_check.py."""
    await client.pause()
    try:
        await client.update_from_disk(version, folder, deadline_s=60)
        await client.name(version)
    finally:
        await client.resume()


def test_scores_are_those_of_transformers_before_and_after_an_update(
    ask: Callable[[Callable[[EngineClient], Awaitable[T]]], T], folders: list[Path]
) -> None:
    for version, folder in enumerate(folders):
        ask(lambda client, at=version: load(client, at, folders[at]))  # type: ignore[misc]
        scored = ask(lambda client: client.prompt_logprobs(ROWS))
        for other in (0, 1):
            theirs = [reference_logprobs(reference_model(folders[other]), row) for row in ROWS]
            gap = max(float(np.abs(a - b).max()) for a, b in zip(scored, theirs, strict=True))
            assert (gap < 1e-4) == (folder == folders[other]), gap


def test_sampled_logprobs_are_those_of_transformers(
    ask: Callable[[Callable[[EngineClient], Awaitable[T]]], T], folders: list[Path]
) -> None:
    ask(lambda client: load(client, 1, folders[1]))
    group = ask(lambda client: client.generate(ROWS[0], 4, Sampling(max_new_tokens=16, temperature=0.7)))
    model = reference_model(folders[1])
    for sample in group:
        theirs = reference_logprobs(model, [*ROWS[0], *sample.tokens], 0.7)[len(ROWS[0]) - 1 :]
        np.testing.assert_allclose(np.array(sample.logprobs), theirs, atol=1e-4)
