"""FP8 on both sides: a real engine serves block FP8, and a real learner of two ranks trains with it emulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.data.event_log import read_metrics
from tests.support.engine_forks import forked_engines
from tests.support.rank_programs import forked_programs
from tests.support.runs import evenkeel_json, make_model, make_recipe

pytestmark = [pytest.mark.loop, pytest.mark.slow, pytest.mark.timeout(400)]


def test_what_is_left_of_the_mismatch_is_kernels(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    metrics = {}
    with forked_engines(), forked_programs():
        for name, emulated in (("plain", False), ("unified", True)):
            recipe = make_recipe(
                tmp_path,
                model,
                name,
                run=dict(steps=3, seed=1),
                rollout=dict(precision="fp8_block"),
                learner=dict(tensor_parallel=2, fp8_emulation=emulated),
            )
            assert evenkeel_json("train", recipe)["state"] == "finished"
            metrics[name] = read_metrics(tmp_path / "runs" / name)
    assert len(metrics["unified"]) == 3
    for plain, unified in zip(metrics["plain"], metrics["unified"], strict=True):
        assert plain["log_ratio_abs_mean"] > 1e-3, "without a gap there is nothing to close"
        assert unified["log_ratio_abs_mean"] < 0.1 * plain["log_ratio_abs_mean"]
        assert unified["k3_kl"] < 0.05 * plain["k3_kl"]
        assert unified["probe_gap_nats"] < 0.1 * plain["probe_gap_nats"]
        assert unified["grad_norm"] > 0
