"""What a stored log-probability means when temperature is not 1 and top-p or top-k cut the distribution.

LogprobContract: softmax(logits / temperature) over the whole vocabulary, whatever was cut before the draw. Real engine,
real learner: at equal weights their ratio is then 1 on every token, and a correction corrects nothing else.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pipeline.data.batch import Completion, Sampling
from rollout_sglang.client import EngineClient
from tests.doubles.tiny_model import reference_model
from tests.integration.workers.scoring import score
from tests.support.engines import TinyEngines
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = [random.Random(0).randrange(256) for _ in range(24)]
TEMPERATURE, TOP_P, TOP_K = 1.3, 0.8, 5
CUTS = {"top_p": (TOP_P, -1), "top_k": (1.0, TOP_K), "both": (TOP_P, TOP_K)}
"""name → (top_p, top_k)"""


@dataclass(frozen=True)
class Sampled:
    """Groups of one engine, and the checkpoint that it serves."""

    checkpoint: Path
    groups: dict[str, list[Completion]]


@pytest.fixture(scope="module")
def sampled(tiny_engines: TinyEngines) -> Sampled:
    engine = tiny_engines.lease(["fp32"])["fp32"]
    return Sampled(engine.checkpoints[0], engine.ask(sample))


async def sample(client: EngineClient) -> dict[str, list[Completion]]:
    return {
        name: await client.generate(
            PROMPT, 8, Sampling(max_new_tokens=24, temperature=TEMPERATURE, top_p=top_p, top_k=top_k)
        )
        for name, (top_p, top_k) in CUTS.items()
    }


@pytest.fixture(scope="module")
def learner_logprobs(sampled: Sampled) -> dict[str, list[NDArray[np.float32]]]:
    """cut → sample → [tokens], from a learner told the temperature and nothing of the cut."""
    rows = [[*PROMPT, *completion.tokens.tolist()] for group in sampled.groups.values() for completion in group]
    (found,) = run_ranks(1, score, sampled.checkpoint, rows, TEMPERATURE)
    scored = [row[len(PROMPT) - 1 :] for row in found["plain"]]
    return {name: [scored.pop(0) for _ in group] for name, group in sampled.groups.items()}


@torch.no_grad()
def whole_distributions(checkpoint: Path, tokens: list[int]) -> NDArray[np.float32]:
    """[responses, vocabulary] log_softmax(logits / temperature) of transformers, at each response token."""
    logits = reference_model(checkpoint)(torch.tensor([tokens])).logits[0, len(PROMPT) - 1 : -1]
    return torch.log_softmax(logits.float() / TEMPERATURE, -1).numpy()


@pytest.mark.parametrize("cut", CUTS)
def test_engine_and_learner_mean_the_same_distribution(
    sampled: Sampled, learner_logprobs: dict[str, list[NDArray[np.float32]]], cut: str
) -> None:
    for completion, learner in zip(sampled.groups[cut], learner_logprobs[cut], strict=True):
        np.testing.assert_allclose(completion.logprobs, learner, atol=1e-4)


@pytest.mark.parametrize("cut", CUTS)
def test_that_distribution_is_scaled_but_not_cut(sampled: Sampled, cut: str) -> None:
    """Log-probabilities of the cut distribution would be larger by -log(mass kept), which is far more than 1e-4."""
    top_p, top_k = CUTS[cut]
    for completion in sampled.groups[cut]:
        whole = whole_distributions(sampled.checkpoint, [*PROMPT, *completion.tokens.tolist()])
        chosen = np.take_along_axis(whole, completion.tokens[:, None], axis=1)[:, 0]
        np.testing.assert_allclose(completion.logprobs, chosen, atol=1e-4)
        # The cut was in force: the draw stayed among the most likely tokens whose mass before it is below top_p.
        order = np.argsort(-whole, axis=1)
        rank = (order == completion.tokens[:, None]).argmax(axis=1)
        before = np.array([np.exp(row[places[:r]]).sum() for row, places, r in zip(whole, order, rank, strict=True)])
        assert top_k < 0 or (rank < top_k).all()
        assert (before <= top_p + 1e-4).all()


def test_the_temperature_is_seen(sampled: Sampled) -> None:
    """At temperature 1 the same tokens have other log-probabilities, so agreement above is no accident."""
    completion = sampled.groups["both"][0]
    with torch.no_grad():
        logits = reference_model(sampled.checkpoint)(torch.tensor([[*PROMPT, *completion.tokens.tolist()]])).logits
    plain = torch.log_softmax(logits[0, len(PROMPT) - 1 : -1].float(), -1)
    chosen = plain.gather(1, torch.from_numpy(completion.tokens.astype(np.int64))[:, None])[:, 0].numpy()
    assert np.abs(completion.logprobs - chosen).max() > 0.05
