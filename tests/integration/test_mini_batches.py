"""Several optimizer steps a batch on real Megatron-Core learners: no layout and no restart may change them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from launch.convert.new_model import new_model
from pipeline.data.event_log import read_metrics
from tests.integration.workers.mini_batches_worker import CASES, STEPS, UPDATES, measure
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow  # tests/integration/test_objectives.py is its everyday counterpart
LAYOUTS = {1: ["one"], 2: ["DP2", "PP2"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every case in every layout."""
    folder = tmp_path_factory.mktemp("mini_batches")
    new_model(folder / "model", hidden=32, layers=2, head_dim=16, ffn=64, seed=1)
    for ranks, layouts in LAYOUTS.items():
        run_ranks(ranks, measure, folder, layouts)
    return folder


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS[2])
def test_no_layout_changes_the_updates(folder: Path, layout: str, case: str) -> None:
    ours, theirs = (read_metrics(folder / f"{name} {case}") for name in ("one", layout))
    assert len(ours) == len(theirs) == STEPS
    for left, right in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm", "entropy", "num_tokens", "ess", "lr", "ratio_max", "clip_hits"):
            assert right.get(name, 0.0) == pytest.approx(left.get(name, 0.0), rel=2e-3, abs=2e-5), name
    change, expected = (np.load(folder / f"{name}.npz")[case] for name in (layout, "one"))
    assert np.abs(change - expected).max() < 5e-3 * np.abs(expected).max()


@pytest.mark.parametrize("layout", ["one", *LAYOUTS[2]])
def test_a_learner_that_is_started_again_goes_on_bit_for_bit(folder: Path, layout: str) -> None:
    found = np.load(folder / f"{layout}.npz")
    assert (found["resumed"] == found["uninterrupted"]).all()


def test_the_clip_acts_from_the_second_update_on(folder: Path) -> None:
    """With one update the learner is its own old policy: no ratio is ever clipped."""
    assert all(line["clip_hits"] == 0 for line in read_metrics(folder / "one one update"))
    first, second, _ = read_metrics(folder / "one grpo")  # in the third the learning rate has gone
    assert min(first["clip_hits"], second["clip_hits"]) > 0.1


def test_optimizer_steps_versions_and_the_learning_rate(folder: Path) -> None:
    """Checkpoints and metrics count batches; the learning rate counts optimizer steps and ends at its least."""
    found = np.load(folder / "one.npz")
    assert (found["one update steps"], found["grpo steps"]) == (STEPS, STEPS * UPDATES)
    assert found["scalerl steps"] == STEPS * (UPDATES - 1), "one of four groups is no part of the loss"
    lines = read_metrics(folder / "one grpo")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[2]["lr"] < lines[1]["lr"] < 3e-3
    assert sorted(path.name for path in (folder / "one grpo" / "checkpoints").iterdir()) == ["000002", "000003"]
