"""Schedules of faults, by seed: nothing lost, nothing twice, nothing stale, and the weights are those of a replay."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.chaos.simulation.plan import Fault, FaultKind, Plan, plan_of
from tests.chaos.simulation.simulate import simulate

SEEDS, EVERYDAY, BLOCK = 200, 60, 20


@pytest.mark.parametrize(
    "first",
    [pytest.param(n, marks=[] if n < EVERYDAY else [pytest.mark.slow]) for n in range(0, SEEDS, BLOCK)],
)
def test_seeds(first: int) -> None:
    for seed in range(first, first + BLOCK):
        result = simulate(plan_of(seed))
        assert result.problems == (), f"python -m tests.chaos.simulation {seed}"


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


# What seeds have found, as small plans: each of them failed before it was mended.


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_batch_is_durable_before_it_is_trained_on(kind: str) -> None:
    """The collector freezes between the link and the fsync of the folder; the learner trains and publishes; the power
    fails. The batch was gone then, the version that had learned from it was published, and nobody could go on."""
    for count in (40, 46, 52):
        faults = (
            Fault(kind="freeze", role="collector", operation="unlink", count=3, seconds=60.0, replaced=False),
            Fault(kind="power cut", role="learner", operation="fsync", count=count),
        )
        plan = Plan(seed=5, kind=kind, steps=4, journaled=False, faults=faults)  # type: ignore[arg-type]
        result = simulate(plan)
        assert [problem for problem in result.problems if "metrics" not in problem] == []
        assert result.happened == ("freeze", "power cut")


@pytest.mark.parametrize("seed", [16, 22])
def test_what_a_finished_learner_removed_does_not_come_back(seed: int) -> None:
    """It had removed its last old checkpoint, and said that nothing was left to do; the power failed. Nobody started it
    again, so what came back of the checkpoint stayed for ever."""
    cut = Fault(kind="power cut", role="collector", operation="rename", count=6)
    result = simulate(Plan(seed=seed, steps=4, keep_checkpoints=1, journaled=False, faults=(cut,)))
    assert result.happened == ("power cut",)
    assert result.problems == ()


@pytest.mark.parametrize("kind", ["kill", "power cut"])
@pytest.mark.parametrize("operation", ["link", "unlink", pytest.param("fsync", marks=pytest.mark.slow)])
def test_a_removal_of_batches_may_end_at_any_operation(kind: FaultKind, operation: str) -> None:
    """Of a learner that removes a batch after each checkpoint but the first: until there is no such operation."""
    plan = Plan(seed=3, steps=4, keep_batches=1, keep_logprobs=1, keep_checkpoints=1, solved=True, journaled=False)
    struck = (kind,)
    for number in itertools.count(1):
        fault = Fault(kind=kind, role="learner", operation=operation, count=number)
        result = simulate(replace(plan, faults=(fault,)))
        assert result.problems == (), fault
        if result.happened != struck:
            break
    assert number > 5, "more of them than it removes batches"


def test_a_start_whose_files_a_later_one_removed_says_that_it_was_superseded() -> None:
    """The first start of the learner froze, and claimed its epoch after the second one. It removed the folder that the
    second was writing version 0 to. That one died of a missing file; started again, it would take over in turn."""
    freeze = Fault(kind="freeze", role="learner", operation="fsync", count=8, seconds=1.4763629905078215)
    result = simulate(Plan(seed=2441, preemption=0.1, faults=(freeze,)))
    assert result.happened == ("freeze",)
    assert result.problems == ()


def test_metrics_stay_though_who_made_their_folder_was_killed_before_it_was_durable() -> None:
    """The next start found the folder there, and made durable only what it wrote within; a power cut took it all."""
    kill = Fault(kind="kill", role="learner", operation="fsync", count=41)
    cut = Fault(kind="power cut", role="learner", operation="update", count=4)
    result = simulate(Plan(seed=1, steps=4, journaled=False, faults=(kill, cut)))
    assert result.happened == ("kill", "power cut")
    assert result.problems == ()


def test_a_line_of_metrics_that_meets_a_full_disk_stops_no_run() -> None:
    """It is missing then, and the run goes on; the judge once expected it all the same (found by seed 61319)."""
    full = Fault(kind="full", role="learner", operation="append", count=8, seconds=5e-5)
    result = simulate(Plan(seed=61319, kind="async", steps=4, faults=(full,)), traced=True)
    assert [line for line in result.trace if "FULL" in line]
    assert not [line for line in result.trace if "OSError" in line]
    assert result.problems == ()


FOUND = {
    4026: "a resync whose listing of updates was cached remembered an older version, and no engine ever came back",
    4380: "of the four groups that a batch could ask, three did not fit, and the judge expected two all the same",
    4710: "the same, of another schedule",
    5007: "a version whose announcement was pruned meanwhile was asked for until the collector's stack was full",
    6588: "hosts remembered after a power cut what they had seen before it",
    30710: "a run's folder that a killed process had made was found there, and never made durable: the power took it",
    90430: "a run's folder, as of seed 30710, after three published versions",
    900340: "a learner whose host remembered an older listing of checkpoints trained a step twice",
}


@pytest.mark.parametrize("seed", FOUND)
def test_what_a_seed_found_stays_mended(seed: int) -> None:
    plan = replace(plan_of(seed), keep_batches=None, keep_logprobs=None)  # drawn since
    assert not [one for one in simulate(plan).problems if seed != 5007 or "Recursion" in one], FOUND[seed]
