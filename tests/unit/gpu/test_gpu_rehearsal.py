"""The checks that need no engine, rehearsed as the command line runs them: real learners, tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu.__main__ import main

CHECKS = ("te_linear", "te_layer", "logprob", "training")
"""`make gpu-rehearsal` runs all."""


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_rehearsal(tmp_path: Path) -> None:
    assert main(["--rehearse", "--only", *CHECKS, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("gpu-*-rehearsal.json")
    found = json.loads(path.read_text())
    outcomes = {(check, part): one for check, parts in found["checks"].items() for part, one in parts.items()}
    assert {check for check, _ in outcomes} == set(CHECKS)
    assert {key for key, one in outcomes.items() if one["status"] == "measured"} == {
        ("te_layer", "bf16"),
        ("logprob", "one"),
        ("training", "bf16"),
        ("training", "32b_bf16"),
    }
    reasons = {one["reason"] for one in outcomes.values() if one["status"] == "not measured"}
    assert all(reason.startswith("needs ") for reason in reasons)
    judged = {row["what"]: row["verdict"] for rows in found["verdicts"].values() for row in rows}
    for what in (
        "bf16: error of what the layer adds",
        "bf16: largest error of a gradient",
        "largest error of a log-probability against float64",
        "largest error of an entropy against float64",
    ):
        assert judged[what] == "met", what
    losses = outcomes["training", "bf16"]["figures"]["bf16_loss"]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    assert outcomes["training", "bf16"]["figures"]["bf16 kernels of a step"][0] == ["kernel", "calls", "ms", "share"]
    table = path.with_suffix(".md").read_text()
    assert table.startswith("# Rehearsal on a CPU: proves the scripts, measures nothing")
    assert "| kernel | calls | ms | share |" in table
