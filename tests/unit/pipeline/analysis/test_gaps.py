"""History finds which steps and versions lack a record, whenever the learner or the collector was killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch.fork.fork import fork_run
from launch.verify.history import check_history
from pipeline.analysis.audit import find_gaps
from pipeline.data.event_log import EventLog
from pipeline.data.run_directory import RunDirectory
from pipeline.repair import apply, find_damage, plan_repair
from tests.support.whole_runs import damage, finish, whole_run


def without_record(run: RunDirectory) -> dict[str, list[int]]:
    found: dict[str, list[int]] = check_history(run.path)["without_record"]
    return found


def test_a_whole_run_has_no_gaps(tmp_path: Path) -> None:
    run = whole_run(tmp_path, controlled=True)
    assert without_record(run) == {}
    assert find_gaps(run, ()) == {}


@pytest.mark.parametrize(
    ("name", "gap"),
    [
        ("logprobs/000003.npy", {"logprobs": [3]}),
        ("mismatch/000000.zarr.zip", {"mismatch": [0]}),
        ("control/000001.json", {"control": [1]}),
        ("evaluations/000002.json", {"evaluations": [2]}),
        ("events/collector-000001.jsonl", {"evaluations": [0, 2, 4]}),
        ("metrics/learner-000001.jsonl", {"metrics": [0, 1, 2, 3]}),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, name: str, gap: dict[str, list[int]]) -> None:
    run = whole_run(tmp_path, controlled=True)
    (run.path / name).unlink()
    assert without_record(run) == gap
    assert not check_history(run.path)["ok"]


@pytest.mark.parametrize("kind", [dict(kind="async", lag=2), dict(kind="staged", updates_per_stage=2)])
def test_an_evaluation_beside_the_batches_is_missing_once_a_later_one_is_there(
    tmp_path: Path, kind: dict[str, Any]
) -> None:
    """That of version 4 may be under way while batches 4 and 5 are committed."""
    run = whole_run(tmp_path, schedule=kind)
    (run.evaluations / "000004.json").unlink()
    path = run.path / "events/collector-000001.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"version": 4' not in line))
    assert without_record(run) == {}
    run.set_finished("collector")
    assert without_record(run) == {"evaluations": [4, 8]}
    (run.path / "finished/collector").unlink()
    (run.evaluations / "000000.json").unlink()
    assert without_record(run) == {"evaluations": [0]}


def test_a_skipped_evaluation_and_one_of_another_version_are_no_gaps(tmp_path: Path) -> None:
    run = whole_run(tmp_path, schedule=dict(kind="async", lag=2))
    for version in (2, 4):
        (run.evaluations / f"{version:06d}.json").unlink()
    path = run.path / "events/collector-000001.jsonl"
    path.write_text(path.read_text().splitlines(True)[0])
    found = dict(version=5, due=4, answered=[[5, 80]], skipped=[2])
    EventLog(run.path, "collector-000002").event("evaluated", **found)
    run.write_evaluation(4, found)
    assert without_record(run) == {}
    assert find_damage(run) == []


def test_a_step_that_no_checkpoint_holds_is_trained_again(tmp_path: Path) -> None:
    """Killed between its record and its checkpoint, or before: a later start records it once more."""
    run = whole_run(tmp_path, saved=(2,))
    for step in (2, 3, 4):
        (run.logprobs / f"{step:06d}.npy").unlink()
    assert without_record(run) == {}


def test_a_torn_line_is_a_gap(tmp_path: Path) -> None:
    """The last line of a learner that was killed, where its checkpoint was saved all the same."""
    run = whole_run(tmp_path)
    path = run.path / "metrics/learner-000001.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    assert without_record(run) == {"metrics": [3]}
    EventLog(run.path, "learner-000002").metrics(3, reward_mean=0.5)
    assert without_record(run) == {}


def test_a_skipped_step_leaves_none(tmp_path: Path) -> None:
    run = whole_run(tmp_path)
    (run.logprobs / "000003.npy").unlink()
    run.note_skipped(3)
    assert without_record(run) == {}


def test_a_finished_run_lacks_what_its_last_step_and_version_lack(tmp_path: Path) -> None:
    run = whole_run(tmp_path, steps=6, committed=6, published=6, policies=(6,), saved=(2, 4, 6))
    finish(run)
    assert without_record(run) == {"evaluations": [6]}
    (run.logprobs / "000005.npy").unlink()
    assert without_record(run) == {"logprobs": [5], "evaluations": [6]}


def test_what_a_repair_has_set_aside_is_no_gap(tmp_path: Path) -> None:
    run = whole_run(tmp_path)
    damage(run.path / "evaluations/000002.json")
    apply(run, plan_repair(run, find_damage(run), "now"))
    found = check_history(run.path)
    assert found["without_record"] == {}
    assert json.dumps(found["repaired"]) == '["evaluations/000002.json"]'


@pytest.mark.parametrize(
    ("parent", "change"),
    [
        (dict(), 'controller={"ess_floor":0.9}'),
        (dict(schedule=dict(kind="staged", updates_per_stage=4)), 'schedule={"kind":"sync"}'),
        (dict(schedule=dict(kind="sync"), controlled=True), "controller=null"),
    ],
)
def test_what_a_fork_took_over_is_judged_by_its_parents_recipe(
    tmp_path: Path, parent: dict[str, Any], change: str
) -> None:
    """Steps without a controller left no record of one; versions of a stage's end alone were evaluated."""
    fork_run(whole_run(tmp_path, **parent).path, Path("new"), 4, [change])
    assert without_record(RunDirectory(tmp_path / "new")) == {}


def test_what_a_fork_took_over_may_lack_a_record(tmp_path: Path) -> None:
    fork_run(whole_run(tmp_path, controlled=True).path, Path("new"), 4, ["controller=null"])
    run = RunDirectory(tmp_path / "new")
    (run.control / "000001.json").unlink()
    assert without_record(run) == {"control": [1]}
