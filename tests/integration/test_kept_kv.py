"""A real SGLang server takes weights while a request goes on over the keys and values of the old ones.

What it should have sampled is worked out by transformers: the old model reads up to the update and hands its cache to
the new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from pipeline.data.batch import Completion, Sampling
from rollout_sglang.client import EngineClient
from tests.doubles.tiny_model import reference_logprobs, reference_model
from tests.support.engines import ROWS, TinyEngine, TinyEngines, load, under_way

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]

SAMPLING = Sampling(max_new_tokens=300)


@pytest.fixture
def engine(tiny_engines: TinyEngines) -> TinyEngine:
    return tiny_engines.lease(("fp32",))["fp32"]


async def updated_in_flight(engine: TinyEngine, client: EngineClient) -> list[Completion]:
    assert engine.spec.log is not None
    asked = await under_way(client.generate(ROWS[2], 4, SAMPLING), engine.spec.log)
    await load(client, 1, engine.checkpoints[1])
    return await asked


@torch.no_grad()
def handed_over(models: Sequence[nn.Module], prompt: Sequence[int], sample: Completion, at: int) -> NDArray[np.float32]:
    """[tokens] log-probabilities where the old model predicts the first `at` tokens and the new one, over its keys and
    values, the others."""
    row = torch.tensor([[*prompt, *sample.tokens.tolist()]])
    place = len(prompt) - 1 + at  # the new model is the first to read this token
    old = models[0](row[:, :place], use_cache=True)
    new = models[1](row[:, place:-1], past_key_values=old.past_key_values)
    logits = torch.cat([old.logits, new.logits], 1)[0, len(prompt) - 1 :].float()
    return torch.log_softmax(logits, -1).gather(1, row[0, len(prompt) :, None])[:, 0].numpy()


def test_a_request_goes_on_over_the_keys_and_values_of_the_old_weights(engine: TinyEngine) -> None:
    engine.load(0)
    group = engine.ask(lambda client: updated_in_flight(engine, client), keeps_kv=True)
    models = [reference_model(folder) for folder in engine.full_precision]
    changed = [sample for sample in group if set(sample.versions) == {0, 1}]
    assert changed
    for sample in changed:
        at = int(np.argmax(sample.versions == 1))
        np.testing.assert_allclose(sample.logprobs, handed_over(models, ROWS[2], sample, at), atol=1e-4)
        read_again = reference_logprobs(models[1], [*ROWS[2], *sample.tokens.tolist()])[len(ROWS[2]) - 1 :]
        assert np.abs(sample.logprobs - read_again)[at:].max() > 0.01, "the new model alone would say otherwise"


def test_a_new_request_finds_no_keys_and_values_of_older_weights(engine: TinyEngine) -> None:
    engine.load(0)
    engine.ask(lambda client: client.generate(ROWS[1], 2, replace(SAMPLING, max_new_tokens=8)), keeps_kv=True)
    engine.ask(lambda client: load(client, 1, engine.checkpoints[1]), keeps_kv=True)
    model = reference_model(engine.full_precision[1])
    group = engine.ask(lambda client: client.generate(ROWS[1], 2, replace(SAMPLING, max_new_tokens=8)), keeps_kv=True)
    for sample in group:
        theirs = reference_logprobs(model, [*ROWS[1], *sample.tokens.tolist()])[len(ROWS[1]) - 1 :]
        np.testing.assert_allclose(sample.logprobs, theirs, atol=1e-4)
