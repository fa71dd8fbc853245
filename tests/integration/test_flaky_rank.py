"""A gradient that is not finite on one rank alone: all ranks make it once more, or all end, and say which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.convert.new_model import new_model
from tests.integration.workers.flaky_rank_worker import measure
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flaky") / "model"
    new_model(folder, hidden=32, layers=2, head_dim=16, ffn=64, seed=1)
    return folder


@pytest.mark.parametrize(
    ("layout", "where"), [("TP2", "before"), ("TP2", "matrix"), ("TP2", "norm"), ("DP2", "before"), ("DP2", "matrix")]
)
def test_one_rank_s_gradient_that_is_not_finite_concerns_all(folder: Path, layout: str, where: str) -> None:
    ranks: list[dict[str, Any]] = run_ranks(2, measure, folder, layout, where)
    for rank in ranks:
        usual, once, twice = rank["0"], rank["1"], rank["2"]
        assert (usual["retries"], once["retries"], twice["retries"]) == (0.0, 1.0, None)
        assert once["finite"]
        np.testing.assert_array_equal(once["own"], usual["own"])
        assert usual["moved"] > 0.0
        assert twice["moved"] == 0.0
        assert "no step was taken" in twice["error"]
        assert usual["said"] == []
        assert "the step is taken from the second" in once["said"][0]
        assert (once["unused"], twice["unused"]) == (0, 0)
        if where == "norm":  # which no rank's norm counts
            assert "a gradient is not finite on one rank alone the first time" in once["said"][0]
