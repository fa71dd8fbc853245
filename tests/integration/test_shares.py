"""A rank reads and holds its own samples alone, and what is trained is what ranks train that hold everything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from launch.convert.new_model import new_model
from launch.verify.layout_ranks import random_experts
from megatron_bridge.hf.model_config import ModelConfig, read_hf_config
from pipeline.data.event_log import read_metrics
from pipeline.data.store import BatchStore
from tests.integration.workers.kept_sets_worker import batch_with_kept_sets
from tests.integration.workers.shares_worker import CASES, large_batch, measure
from tests.support.ranks import run_ranks

STEPS = 4
CHUNK_BYTES = 16 << 10
"""Least of a chunk in the large batch here: it is a tenth of one for which 64 KiB are little."""


def new_mixture(folder: Path) -> ModelConfig:
    new_model(folder, hidden=32, layers=2, head_dim=16, ffn=64, experts=4, experts_per_token=2, expert_ffn=32, seed=1)
    return ModelConfig.from_hf(read_hf_config(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Batches with routes, kept sets, tokens that no engine sampled, and a group whose rewards are equal."""
    folder = tmp_path_factory.mktemp("shares")
    model, store = new_mixture(folder / "model"), BatchStore(folder / "batches")
    for index in range(STEPS):
        batch = batch_with_kept_sets(model.vocab_size)
        solved = np.where(batch.group == index % 4, 1.0, np.arange(batch.num_samples) % 3 == 0).astype(np.float32)
        experts = random_experts(batch, model, seed=index, unknown=0.25)
        ages = np.arange(batch.num_response_tokens) % (index + 1)
        store.commit(
            replace(
                batch,
                index=index,
                reward=solved,
                experts=experts,
                rollout_logprobs=np.minimum(batch.rollout_logprobs, 0.0),
                policy_version=(index - ages).astype(np.int32),
            )
        )
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """What one process learns, by case."""
    return {case: run_ranks(1, measure, folder, "one", case, STEPS)[0] for case in CASES}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("layout", "ranks"), [("DP2", 2), ("DP2×CP2", 4), ("DP2×TP2×SP", 4), ("DP2×PP2", 4)])
def test_what_is_learned_from_shares_is_what_one_process_learns(
    folder: Path, alone: dict[str, Any], layout: str, ranks: int, case: str
) -> None:
    found = run_ranks(ranks, measure, folder, layout, case, STEPS)
    whole = alone[case]
    change = np.abs(found[0]["change"] - whole["change"]).max() / np.abs(whole["change"]).max()
    assert change < 5e-3
    ours, theirs = (read_metrics(folder / f"{name} {case}") for name in (layout, "one"))
    for mine, reference in zip(ours, theirs, strict=True):
        for name in (
            "loss",
            "grad_norm",
            "ess",
            "num_tokens",
            "entropy",
            "log_ratio_p50",
            "lag_mean",
            "experts_known_share",
        ):
            assert mine[name] == pytest.approx(reference[name], rel=2e-3, abs=2e-5), name
    if case == "several":  # with one update the learner is its own old policy: no ratio is clipped before the second
        assert ours[0]["clip_hits"] > 0
    copies = ranks // 2
    for name in ("tokens", "routes", "kept"):
        held = [each[name] for each in found]
        assert sum(held) == copies * whole[name], f"{name}: every sample is held by one data parallel rank"
        assert max(held) < 0.7 * whole[name], name


@pytest.mark.slow
def test_a_rank_of_four_reads_less_than_a_third_of_a_batch_in_a_step(tmp_path: Path) -> None:
    model, store = new_mixture(tmp_path / "model"), BatchStore(tmp_path / "batches")
    with patch("pipeline.data.zarr_zip.LEAST_BYTES", CHUNK_BYTES):
        batch = large_batch(model, samples=768, longest=1200)
        size = store.commit(batch).stat().st_size
    found = run_ranks(4, measure, tmp_path, "DP4", "p3o", 1)
    for rank, each in enumerate(found):
        assert 0.2 * size < each["read"] <= 0.3 * size, f"rank {rank} read {each['read']} of {size} bytes"
        assert each["tokens"] <= 0.3 * len(batch.tokens)
    assert sum(each["routes"] for each in found) == batch.experts.ids.nbytes  # type: ignore[union-attr]
    assert (sum(each["share"].astype(int) for each in found) == 1).all()
