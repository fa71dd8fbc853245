"""Kept sets end to end: a real engine cuts and says what it left, a real learner renormalizes over it.

An importance weight rho = pi_theta / pi_engine has mean 1 over what the engine samples, whatever the learner's weights,
if pi_engine is the distribution that was sampled from and pi_theta has the same support. Given the tokens before,
rho - 1 has mean 0 at every token: the tokens' errors are uncorrelated, so the standard error is std(rho) / sqrt(n).
"""

from __future__ import annotations

import asyncio
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from pipeline.config.sections import RolloutPrecision
from pipeline.data.batch import Batch, Completion, Group, LogprobContract, Prompt, Sample, Sampling
from rollout_sglang.client import EngineClient
from tests.integration.workers.scoring import score_batches
from tests.support.engines import TinyEngine, TinyEngines, load, under_way
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

TEMPERATURE, TOP_P, GROUP_SIZE, TOKENS = 1.3, 0.8, 16, 64
PROMPTS = [tuple(random.Random(seed).randrange(256) for _ in range(16)) for seed in range(24)]
"""24 × 16 × 64 = 24,576 tokens at most; a response may end before."""


def batch_of(groups: list[list[Completion]]) -> Batch:
    return Batch.from_groups(
        0,
        [
            Group(
                prompt=Prompt(group=number, text="", answer="", tokens=prompt),
                samples=tuple(Sample(completion=completion, reward=0.0) for completion in group),
            )
            for number, (prompt, group) in enumerate(zip(PROMPTS, groups, strict=False))
        ],
        contract=LogprobContract(temperature=TEMPERATURE, top_p=TOP_P, top_k=-1, tokenizer_sha256="", kept_set=True),
        dropped=(),
        next_group=len(groups),
        recipe_sha256="",
    )


def sampled(engine: TinyEngine) -> Batch:
    sampling = Sampling(max_new_tokens=TOKENS, temperature=TEMPERATURE, top_p=TOP_P, kept_set=True)

    async def ask(client: EngineClient) -> list[list[Completion]]:
        return await asyncio.gather(*(client.generate(prompt, GROUP_SIZE, sampling) for prompt in PROMPTS))

    return batch_of(engine.ask(ask))


@dataclass(frozen=True)
class Weights:
    """rho of every token, and what they say."""

    rho: NDArray[np.float64]

    @property
    def standard_error(self) -> float:
        return float(self.rho.std(ddof=1) / np.sqrt(len(self.rho)))

    @property
    def z(self) -> float:
        """Distance of the mean from 1, in standard errors."""
        return (float(self.rho.mean()) - 1.0) / self.standard_error


def moved(checkpoint: Path, towards: Path, share: float, directory: Path) -> Path:
    """The weights a part of the way to others."""
    shutil.copytree(checkpoint, directory)
    start, end = (load_file(folder / "model.safetensors") for folder in (checkpoint, towards))
    between = {name: (1 - share) * weight + share * end[name] for name, weight in start.items()}
    save_file(between, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@dataclass(frozen=True)
class Found:
    batches: dict[str, Batch]
    scores: dict[str, dict[str, NDArray[np.float32]]]
    """learner → batch → [responses]"""

    def weights(self, learner: str, batch: str) -> Weights:
        rollout = self.batches[batch].rollout_logprobs.astype(np.float64)
        return Weights(np.exp(self.scores[learner][batch].astype(np.float64) - rollout))


def sampled_over_an_update(engine: TinyEngine) -> Batch:
    """Requests under way are retracted, prefilled again and go on with version 1."""
    sampling = Sampling(max_new_tokens=400, temperature=TEMPERATURE, top_p=TOP_P, kept_set=True)

    async def ask(client: EngineClient) -> list[Completion]:
        group = await under_way(client.generate(PROMPTS[0], 8, sampling), engine.spec.log)
        await load(client, 1, engine.checkpoints[1])
        return await group

    return batch_of([engine.ask(ask)])


@pytest.fixture(scope="module")
def found(tiny_engines: TinyEngines, tmp_path_factory: pytest.TempPathFactory) -> Found:
    precisions: list[RolloutPrecision] = ["fp32", "fp8_block"]
    engines = tiny_engines.lease(precisions)
    plain = engines["fp32"].full_precision
    batches = {
        "fp32": sampled(engines["fp32"]),
        "fp8_block": sampled(engines["fp8_block"]),
    }
    batches["updated"] = sampled_over_an_update(engines["fp32"])
    # The learner over the whole vocabulary, on a batch whose engine said what it sampled from: half a contract.
    batches["half"] = replace(batches["fp32"], kept=None)
    folder = moved(plain[0], plain[1], 0.05, tmp_path_factory.mktemp("moved") / "model")
    learners = {"same": plain[0], "moved": folder, "version 1": plain[1]}
    (rows,) = run_ranks(1, score_batches, list(learners.values()), list(batches.values()), TEMPERATURE)
    scores = {name: dict(zip(batches, row, strict=True)) for name, row in zip(learners, rows, strict=True)}
    return Found(batches, scores)


def test_at_equal_weights_both_mean_the_same_distribution(found: Found) -> None:
    batch = found.batches["fp32"]
    assert batch.kept is not None
    np.testing.assert_allclose(found.scores["same"]["fp32"], batch.rollout_logprobs, atol=1e-4)
    assert batch.num_response_tokens > 20_000
    assert 1 < batch.kept.counts.mean() < 400  # of 512


@pytest.mark.parametrize(("learner", "batch"), [("moved", "fp32"), ("same", "fp8_block"), ("moved", "fp8_block")])
def test_the_mean_weight_is_1_with_kept_sets(found: Found, learner: str, batch: str) -> None:
    weights = found.weights(learner, batch)
    assert abs(weights.z) < 4
    assert weights.rho.std() > 0.01  # not the trivial 1
    assert weights.standard_error < 0.01


def test_it_is_not_without_them(found: Found) -> None:
    weights = found.weights("moved", "half")
    assert weights.z < -8


def test_kept_sets_go_on_over_an_update_of_the_weights(found: Found) -> None:
    """Each token's set and probability are of the version that sampled it."""
    batch = found.batches["updated"]
    assert set(batch.policy_version.tolist()) == {0, 1}
    old, new = (found.scores[name]["updated"] for name in ("same", "version 1"))
    np.testing.assert_allclose(np.where(batch.policy_version == 0, old, new), batch.rollout_logprobs, atol=1e-4)
