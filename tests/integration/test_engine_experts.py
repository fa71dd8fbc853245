"""A real SGLang server on a mixture of experts: it scores and samples as transformers does, before and after an update.

The block-quantized server of dense models is in test_engine.py; SGLang has no FP8 experts on a CPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from launch.convert.new_model import new_model
from pipeline.data.batch import Completion, Sampling
from pipeline.data.routed_experts import ExpertShape
from rollout_sglang.client import EngineClient
from rollout_sglang.server.start import EngineSpec, free_port
from tests.doubles.tiny_model import reference_logprobs, reference_model
from tests.support.engine_forks import start_engine
from tests.support.engines import KEY, TinyEngine, load, under_way

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]

SHAPE = ExpertShape(num_layers=2, moe_layers=(0, 1), num_experts=8, per_token=2)
ROWS = [[random.Random(row).randrange(46) for _ in range(24)] for row in range(4)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyEngine]:
    root = tmp_path_factory.mktemp("experts")
    folders = (root / "0", root / "1")
    for seed, folder in enumerate(folders):
        new_model(folder, experts=8, experts_per_token=2, expert_ffn=96, seed=seed)
    spec = EngineSpec(
        model=folders[0],
        port=free_port(),
        precision="fp32",
        dtype="float32",
        log=root / "engine.log",
        version=0,
        api_key=KEY,
        extra_args=("--enable-return-routed-experts",),
    )
    process = start_engine(spec)
    try:
        process.wait_ready(300.0)
        yield TinyEngine(process, spec, folders, folders, None)
    finally:
        process.kill()


def test_scores_are_those_of_transformers_before_and_after_an_update(engine: TinyEngine) -> None:
    folders = engine.checkpoints
    for version, folder in enumerate(folders):
        engine.load(version)
        scored = engine.ask(lambda client: client.prompt_logprobs(ROWS))
        for other in (0, 1):
            theirs = [reference_logprobs(reference_model(folders[other]), row) for row in ROWS]
            gap = max(float(np.abs(a - b).max()) for a, b in zip(scored, theirs, strict=True))
            assert (gap < 1e-4) == (folder == folders[other]), gap


def test_sampled_logprobs_are_those_of_transformers(engine: TinyEngine) -> None:
    engine.load(1)
    group = engine.ask(lambda client: client.generate(ROWS[0], 4, Sampling(max_new_tokens=16, temperature=0.7)))
    model = reference_model(engine.checkpoints[1])
    for sample in group:
        theirs = reference_logprobs(model, [*ROWS[0], *sample.tokens.tolist()], 0.7)[len(ROWS[0]) - 1 :]
        np.testing.assert_allclose(sample.logprobs, theirs, atol=1e-4)


def expected_routes(folder: Path, tokens: Sequence[int]) -> NDArray[np.int64]:
    """[tokens, layers, per_token] the experts that transformers sends each token to, ascending."""
    model = reference_model(folder)
    found: list[Tensor] = []
    for block in model.get_submodule("model.layers").children():
        block.mlp.gate.register_forward_hook(  # type: ignore[union-attr]
            lambda module, inputs, output: found.append(output[2].sort(-1).values)
        )
    with torch.no_grad():
        model(torch.tensor([tokens]))
    return torch.stack(found, 1).numpy()


def assert_routes(sample: Completion, prompt: list[int], folder: Path, first_known: int) -> None:
    tokens = [*prompt, *sample.tokens.tolist()]
    assert sample.experts is not None
    known = np.arange(len(tokens)) >= first_known
    known[-1] = False
    np.testing.assert_array_equal(sample.experts.known, known)
    theirs = expected_routes(folder, tokens)[known]
    np.testing.assert_array_equal(np.sort(sample.experts.ids[known], axis=-1), theirs)


def test_routes_are_those_of_transformers_also_of_prompts_that_were_cached(engine: TinyEngine) -> None:
    engine.load(0)
    for _ in range(2):
        group = engine.ask(lambda client: client.generate(ROWS[1], 3, Sampling(max_new_tokens=20, experts=SHAPE)))
        for sample in group:
            assert_routes(sample, ROWS[1], engine.checkpoints[0], 0)


def test_routes_after_an_update_in_flight_are_known_from_the_new_weights_on(engine: TinyEngine) -> None:
    """A request of several hundred tokens is retracted for the update, and prefilled again by the new weights. Of so
    many samples some are under way then: this model ends about half of them earlier."""
    sampling = Sampling(max_new_tokens=300, experts=SHAPE)

    async def update_in_flight(client: EngineClient) -> list[Completion]:
        asked = await under_way(client.generate(ROWS[2], 16, sampling), engine.spec.log)
        await load(client, 1, engine.checkpoints[1])
        return await asked

    engine.load(0)
    group = engine.ask(update_in_flight)
    changed = [sample for sample in group if set(sample.versions) == {0, 1}]
    assert changed
    for sample in changed:
        assert_routes(sample, ROWS[2], engine.checkpoints[1], len(ROWS[2]) + int(np.argmax(sample.versions == 1)) - 1)
