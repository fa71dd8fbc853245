"""`evenkeel repair`: says what it would do, does it when it is asked, and never under a run that is at work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.repair import repair_run
from pipeline.data.checksums import write_sealed_json
from pipeline.data.epochs import claim, newest
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RunConflictError, SupersededError
from tests.support.runs import evenkeel
from tests.support.whole_runs import damage, whole_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setattr("launch.run.claim.WATCH_S", 0.3)
    run = whole_run(tmp_path)
    ended(run)
    damage(run.batches / "000001.zarr.zip")
    return run


def ended(run: RunDirectory, **changes: Any) -> None:
    """The roles' newest starts were of a process of this host that lives no more."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    for role in ("collector", "learner"):
        said = dict(host=os.uname().nodename, pid=gone.pid, time=1.0)
        write_sealed_json(run.path / "epochs" / role / "000001", {**said, **changes})


def contents(run: RunDirectory) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def test_without_apply_nothing_is_changed(run: RunDirectory) -> None:
    before = contents(run)
    said = evenkeel("repair", str(run.path))
    assert said.returncode == 1
    assert "000001.zarr.zip: fails its checks" in said.stdout
    assert "recorded as lost: the checkpoint of step 4 has learned from it" in said.stdout
    assert f"nothing was changed; to do it: evenkeel repair {run.path} --apply" in said.stdout
    assert contents(run) == before


def test_applied_it_is_done_and_the_run_is_whole(run: RunDirectory) -> None:
    said = evenkeel("repair", str(run.path), "--apply")
    assert said.returncode == 0, said.stderr
    assert f"done; what was damaged lies in {run.path}/damaged/000001" in said.stdout
    assert "started again, the run goes on from step 4" in said.stdout
    again = evenkeel("repair", str(run.path), "--json")
    assert again.returncode == 0
    assert json.loads(again.stdout)["whole"]
    history = evenkeel("verify", "history", str(run.path), "--json")
    found = json.loads(history.stdout)
    assert [one.split(" (")[0] for one in found["lost_by_damage"]] == ["batch 1 was lost by damage"]
    assert found["repaired"] == ["batches/000001.zarr.zip"]
    assert (found["lost"], found["without_record"]) == (0, {})


def test_a_run_at_work_is_left_alone(run: RunDirectory) -> None:
    claim(run.path, "collector")  # this process
    before = contents(run)
    with pytest.raises(
        RunConflictError, match=rf"is at work: collector \(process {os.getpid()} on .*\); stop it first"
    ):
        repair_run(run.path, do=True, stopped=True)
    assert contents(run) == before
    assert repair_run(run.path, do=False, stopped=False)["repairs"], "to look is allowed"


def test_roles_of_other_hosts_are_asked_about(run: RunDirectory) -> None:
    ended(run, host="node-7")
    with pytest.raises(
        RunConflictError, match=r"whether collector \(process \d+ on node-7\) has ended .* by --stopped"
    ):
        repair_run(run.path, do=True, stopped=False)
    assert repair_run(run.path, do=True, stopped=True)["applied"]


def test_a_process_that_was_frozen_meanwhile_does_not_go_on(run: RunDirectory) -> None:
    epoch = claim(run.path, "learner")
    ended(run)
    write_sealed_json(epoch.folder / f"{epoch.number:06d}", dict(host="node-7", pid=1, time=1.0))
    repair_run(run.path, do=True, stopped=True)
    with pytest.raises(SupersededError):
        epoch.check()


def test_a_damaged_count_of_starts_hinders_no_repair(run: RunDirectory) -> None:
    claim(run.path, "learner")
    ended(run)
    write_sealed_json(run.path / "epochs/learner/000002", dict(host=os.uname().nodename, pid=2**22 + 1, time=1.0))
    damage(run.path / "epochs/learner/NEWEST")
    assert repair_run(run.path, do=True, stopped=False)["applied"]
    assert newest(run.path / "epochs/learner") == 3
