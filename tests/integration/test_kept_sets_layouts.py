"""Kept sets in the learner: transformers' probabilities, and the same step in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launch.verify.layout_ranks import TEMPERATURE
from launch.verify.layouts import write_model
from tests.doubles.tiny_model import reference_model
from tests.integration.workers.kept_sets_worker import batch_with_kept_sets, measure
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

LAYOUTS = {1: ["one", "one×MB1"], 2: ["TP2×SP", "CP2", "PP2", "PP2×VPP2", "DP2"], 4: ["TP2×SP×CP2"]}
"""Processes → layouts."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept-sets") / "dense"
    write_model(folder, experts=False)
    return folder


@pytest.fixture(scope="module")
def found(model: Path) -> dict[str, list[dict[str, Any]]]:
    """layout → what each rank found."""
    every: dict[str, list[dict[str, Any]]] = {}
    for size, layouts in LAYOUTS.items():
        ranks = run_ranks(size, measure, model, layouts)
        every |= {name: [rank[name] for rank in ranks] for name in layouts}
    return every


def test_one_process_has_the_probabilities_of_transformers(model: Path, found: dict[str, list[dict[str, Any]]]) -> None:
    reference = reference_model(model)
    batch = batch_with_kept_sets(reference.config.vocab_size)
    assert batch.kept is not None
    ours, offsets = found["one"][0]["logprobs"], batch.response_offsets
    for sample in range(batch.num_samples):
        tokens = torch.from_numpy(batch.sample_tokens(sample)).long()
        with torch.no_grad():
            logits = reference(tokens[None]).logits[0, batch.prompt_lengths[sample] - 1 : -1].double() / TEMPERATURE
        for place, row in zip(range(offsets[sample], offsets[sample + 1]), logits, strict=True):
            kept = batch.kept.tokens[batch.kept.offsets[place] : batch.kept.offsets[place + 1]]
            if batch.loss_mask[place]:
                own = int(np.flatnonzero(kept == batch.response_tokens[place])[0])
                assert ours[place] == pytest.approx(torch.log_softmax(row[kept.tolist()], 0)[own].item(), abs=1e-5)
            else:
                assert ours[place] == 0.0


@pytest.mark.parametrize("layout", [name for layouts in LAYOUTS.values() for name in layouts if name != "one"])
def test_a_layout_takes_the_step_of_one_process(found: dict[str, list[dict[str, Any]]], layout: str) -> None:
    one = found["one"][0]
    for rank in found[layout]:
        for name in ("logprobs", "trained", "whole"):
            np.testing.assert_allclose(rank[name], one[name], rtol=0, atol=1e-6 if name != "whole" else 4e-6)
        for name in ("loss", "grad_norm", "entropy", "ess"):
            # The loss is what is left of terms of about 1 that cancel: 1e-7 is the last bit of those.
            assert rank["metrics"][name] == pytest.approx(one["metrics"][name], rel=1e-6, abs=1e-7), name
        # A weight of .02 is a multiple of 2e-9 in float32, its change by 1e-3 one of 2e-6 of itself.
        change = np.linalg.norm(rank["weight_change"] - one["weight_change"])
        assert change <= 5e-6 * np.linalg.norm(one["weight_change"])


def test_a_step_without_kept_sets_is_another_one(found: dict[str, list[dict[str, Any]]]) -> None:
    """The renormalized probabilities of the first sample are larger than those over the whole vocabulary."""
    whole, cut = found["one"][0]["whole"], found["one"][0]["trained"]
    assert cut[: len(whole) // 2].mean() > whole.mean() + 1.0
