"""`evenkeel verify parity`: learner and engine agree token by token, and FP8 rollouts are what the learner emulates."""

from __future__ import annotations

import pytest

from tests.support.engine_forks import forked_engines
from tests.support.rank_programs import forked_programs
from tests.support.runs import evenkeel_json

pytestmark = [pytest.mark.loop, pytest.mark.slow, pytest.mark.timeout(500)]


def test_parity() -> None:
    with forked_engines(), forked_programs():
        result = evenkeel_json("verify", "parity", "--layouts", "TP2,PP2")
    assert result["max_abs_logprob_gap"] <= 1e-4
    assert set(result["layouts"]) == {"TP2", "PP2"}
    for name, row in result["fp8"].items():
        assert row["mean_gap"] > 1e-3, f"{name}: without a gap there is nothing to close"
        assert row["closed_share"] >= 0.9, name
    assert result["ok"]
