"""Log-probabilities at the version that sampled, with real Megatron-Core learners: what the loop gives its objective is
what the policy thought then, also after a restart, in another layout too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.convert.new_model import new_model
from pipeline.data.event_log import read_metrics
from tests.integration.workers.kept_versions_worker import STEPS, STOP, measure
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow  # every day, test_loop's run with lag reads the same factor and objective


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept_versions")
    new_model(folder / "model", hidden=32, layers=2, head_dim=16, ffn=64, seed=1)
    run_ranks(2, measure, folder, "PP2", "DP2")
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    return dict(np.load(folder / "found.npz"))


def test_the_objective_gets_what_the_policy_thought_when_it_sampled(found: dict[str, Any]) -> None:
    assert found["given 0"] == 0.0, "the first batch is of the present version: nothing was scored for it"
    for index in range(1, STEPS):
        # Bit for bit but for the order in which rows are packed: the samples of one version are scored alone.
        np.testing.assert_allclose(found[f"given {index}"], found[f"expected {index}"], atol=2e-6)
        assert np.abs(found[f"given {index}"] - found[f"present {index}"]).max() > 1e-3, "the policy has moved since"


def test_a_stale_batch_is_learned_from_by_a_smaller_step(folder: Path) -> None:
    lines = read_metrics(folder / "whole")
    assert lines[0]["staleness_ess"] == lines[0]["lr_factor"] == 1.0
    for line in lines[2:]:
        assert 0.0 < line["staleness_ess"] < 1.0
        assert line["lr_factor"] == pytest.approx(1.0 - (1.0 - line["staleness_ess"]) ** 0.5)
        assert line["lr"] == pytest.approx(3e-3 * line["lr_factor"])


def test_a_restart_changes_nothing(folder: Path, found: dict[str, Any]) -> None:
    """The versions before the checkpoint are those that the killed learner kept."""
    assert (found["resumed"] == found["whole"]).all()
    kept = sorted(path.name for path in (folder / "resumed" / "checkpoints" / f"{STOP:06d}" / "versions").iterdir())
    assert kept == ["000002", "000003"]


def test_a_restart_in_another_layout_has_the_same_versions(folder: Path, found: dict[str, Any]) -> None:
    whole, moved = read_metrics(folder / "whole"), read_metrics(folder / "moved")
    for left, right in zip(whole, moved, strict=True):
        for name in ("loss", "staleness_ess", "lr_factor", "kl_loss", "ess"):
            assert right[name] == pytest.approx(left[name], rel=2e-3, abs=2e-5), name
    np.testing.assert_allclose(found["moved"], found["whole"], atol=2e-4)
