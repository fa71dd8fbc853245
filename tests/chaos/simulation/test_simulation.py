"""Schedules of faults, by seed: nothing lost, nothing twice, nothing stale, and the weights are those of a replay."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.chaos.simulation import cases
from tests.chaos.simulation.disk import _found
from tests.chaos.simulation.plan import Fault, Plan, plan_of
from tests.chaos.simulation.simulate import simulate

SEEDS, EVERYDAY, BLOCK = 200, 100, 20


@pytest.mark.parametrize(
    "first",
    [pytest.param(n, marks=[] if n < EVERYDAY else [pytest.mark.slow]) for n in range(0, SEEDS, BLOCK)],
)
def test_seeds(first: int) -> None:
    for seed in range(first, first + BLOCK):
        result = simulate(plan_of(seed))
        assert result.problems == (), f"python -m tests.chaos.simulation --seed {seed}"


@pytest.mark.parametrize("kind", ["sync", "async", "staged"])
def test_without_faults_nothing_is_started_twice(kind: str) -> None:
    result = simulate(Plan(seed=0, kind=kind), traced=True)  # type: ignore[arg-type]
    assert result.verdict == "ok"
    ended = [line for line in result.trace if "ends" in line and "delivery" not in line]
    assert len(ended) == 3, "the collector, the learner and the operator"


def test_a_real_batch_file_serves_too() -> None:
    assert simulate(Plan(seed=1, kind="sync", steps=2, real_files=True)).verdict == "ok"


TOLD = replace(plan_of(6), faults=(Fault(kind="kill both", role="learner", operation="any", count=150),))
TELL = (
    "from tests.chaos.simulation import test_simulation as t; print(*t.simulate(t.TOLD, traced=True).trace, sep='\\n')"
)


def test_one_seed_is_one_history() -> None:
    """Also in another process, whose sets have another order."""
    first, second = simulate(TOLD, traced=True), simulate(TOLD, traced=True)
    assert first.trace == second.trace
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "1"}
    told = subprocess.run([sys.executable, "-c", TELL], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.splitlines() == "\n".join(first.trace).splitlines()
    assert first.happened == ("kill both",)
    assert simulate(replace(TOLD, seed=7)).points != first.points


@pytest.mark.parametrize("kind", ["kill", "kill both", "freeze", "power cut", "full", "clock", "stop"])
def test_every_fault_strikes_where_it_is_told(kind: str) -> None:
    fault = Fault(kind=kind, role="collector", operation="link", count=3, seconds=5.0)  # type: ignore[arg-type]
    result = simulate(Plan(seed=3, faults=(fault,)), traced=True)
    assert result.happened == (kind,)
    assert result.problems == ()


def test_a_power_cut_leaves_what_was_synced_or_more() -> None:
    draw = random.Random(0)
    found = {_found(b"synced", b"synced and more", draw) for _ in range(200)}
    assert {b"synced", b"synced and more"} < found
    assert all(b"synced and more".startswith(content) and len(content) >= 6 for content in found)
    assert _found(None, b"", draw) == b""


def test_cases_cover_ten_thousand_seeds() -> None:
    assert len(cases()) * 25 == 10_000
    assert cases()[1].id == "seeds-00025"
