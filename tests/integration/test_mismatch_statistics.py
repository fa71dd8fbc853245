"""Statistics of a real step on real ranks: those of brute force, and those of sums over micro-batches and ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.verify.layouts import write_model
from tests.integration.workers import mismatch_worker
from tests.support.ranks import run_ranks

LAYOUTS = ["DP2", "TP2", "CP2"]


@pytest.mark.slow
def test_statistics_are_exact_in_every_layout(tmp_path: Path) -> None:
    write_model(tmp_path / "model", experts=False)
    for rank in run_ranks(2, mismatch_worker.compare, tmp_path / "model", LAYOUTS):
        for layout, found in zip(LAYOUTS, rank, strict=True):
            assert found["micro_batches"] > 1, layout
            assert found["groups"] > 10, layout
            assert found["brute_force"] == pytest.approx(0.0, abs=1e-9), layout
            assert found["sharded"] == pytest.approx(0.0, abs=1e-9), layout
