"""A real engine samples in FP4, which it emulates, and a real learner trains on that."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.data.event_log import read_metrics
from tests.support.engine_forks import forked_engines
from tests.support.rank_programs import forked_programs
from tests.support.runs import evenkeel_json, make_model, make_recipe

pytestmark = [pytest.mark.loop, pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_run_trains_on_fp4_rollouts_and_knows_the_formats_as_the_cause_of_its_mismatch(tmp_path: Path) -> None:
    recipe = make_recipe(
        tmp_path,
        make_model(tmp_path / "model"),
        "fp4",
        run=dict(steps=3, seed=1),
        rollout=dict(precision="emulated_fp4"),
    )
    with forked_engines(), forked_programs():
        assert evenkeel_json("train", recipe)["state"] == "finished"
    metrics = read_metrics(tmp_path / "runs" / "fp4")
    assert len(metrics) == 3
    for step in metrics:
        assert step["log_ratio_abs_mean"] > 1e-2, "FP4 without a gap is not FP4"
        assert step["probe_quantization_nats"] > 1e-2
        assert step["probe_kernels_nats"] < 1e-2 * step["probe_quantization_nats"]
        assert step["grad_norm"] > 0
