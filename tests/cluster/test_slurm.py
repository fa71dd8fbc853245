"""Rendered jobs, unchanged, under a real Slurm: to the end, a node that dies, a requeue, signals and the time limit.

slurmctld runs on h1, slurmd on h2, h3 and h4. A node counts as down after 10 s of silence here (SlurmdTimeout; 300 s
unless told), and a requeued job waits 15 s (cred_expire; 120 s unless told).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.cluster.conftest import ROOT
from tests.cluster.rig import Hosts, Slurm
from tests.cluster.slurm_run import SlurmRun
from tests.support.runs import make_model

pytestmark = pytest.mark.timeout(900)
Table = list[tuple[str, ...]]


@pytest.fixture(scope="module")
def slurm(hosts: Hosts) -> Iterator[Slurm]:
    """slurmctld and three slurmd."""
    running = Slurm(hosts).up()
    yield running
    running.down()


@pytest.fixture(scope="module")
def model(hosts: Hosts) -> Path:
    return make_model(hosts.shared / "model")


@pytest.fixture(autouse=True)
def all_nodes_are_idle(slurm: Slurm, hosts: Hosts) -> Iterator[None]:
    """What a test broke is mended for the next one."""
    yield
    slurm.call("scancel", "--user=root")
    give_up = time.monotonic() + 60
    while slurm.call("squeue", "-h").strip() or set(slurm.call("sinfo", "-h", "-N", "-o", "%T").split()) != {"idle"}:
        assert time.monotonic() < give_up, slurm.call("sinfo", "-N") + slurm.call("squeue")
        time.sleep(0.5)


def since(began: float) -> str:
    return f"{time.monotonic() - began:.0f} s"


def finish(run: SlurmRun, table: Table, what: str, took: str) -> None:
    """The run must be sound; adds its row to the table."""
    run.check_sound()
    table.append((f"Slurm: {what}", took, "0", "0", "bit-identical"))


def holders_of(text: bytes, *folders: Path) -> list[Path]:
    """Files that hold a text."""
    files = (Path(base) / name for folder in folders for base, _, names in os.walk(folder) for name in names)
    return [file for file in files if file.is_file() and text in file.read_bytes()]


def test_a_job_runs_to_its_end(slurm: Slurm, hosts: Hosts, model: Path, table: Table) -> None:
    """And the API key is in no file but its own, in no argument, and not in what Slurm stores of the job."""
    run = SlurmRun(slurm, "whole", model, options=("--spare", "0"))
    began = time.monotonic()
    job = run.submit()
    run.wait_steps(1)
    (key_file,) = run.keys.iterdir()
    key = key_file.read_bytes().strip()
    assert (key_file.stat().st_mode & 0o777, len(key)) == (0o600, 48)
    assert holders_of(key, hosts.shared) == [key_file]
    arguments = [Path(f"/proc/{pid}/cmdline") for host in ("h2", "h3", "h4") for pid in hosts.processes(host)]
    assert not [path for path in arguments if path.exists() and key in path.read_bytes()]
    run.wait_end(job)
    took = since(began)
    assert not list(run.keys.iterdir())
    assert {path.name for path in (run.path / "logs").glob("slurm-*")} == {f"slurm-{job}-0"}
    assert {path.name.rpartition("-")[0] for path in run.logs(job).glob("*-0*.log")} == {
        *("learner", "learner-1", "collector", "engine-0")
    }
    finish(run, table, "4 steps to their end", took)


def test_a_spare_node_takes_over(slurm: Slurm, hosts: Hosts, model: Path, table: Table) -> None:
    """The job goes on, without being requeued."""
    run = SlurmRun(slurm, "spare", model, steps=8, options=("--spare", "1"))
    job = run.submit()
    run.wait_steps(2)
    began = time.monotonic()
    hosts.crash("h3")
    trained = run.trained()
    run.wait(lambda: "learner-1 moves from h3 to h4" in run.said(), "the spare node")
    moved = since(began)
    run.wait_steps(trained + 2)
    went_on = since(began)
    run.wait_end(job)
    assert run.field(job, "Restarts") == "0"
    hosts.reboot("h3")
    slurm.restart("h3")
    finish(run, table, "a node dies, the spare one takes over", f"started {moved}, two steps {went_on}")


def test_without_a_spare_the_job_is_requeued_and_the_superseded_one_writes_nothing(
    slurm: Slurm, hosts: Hosts, model: Path, table: Table
) -> None:
    """The node of the batch script is cut off. Its roles live on; their cable is put back once their successors are at
    work."""
    run = SlurmRun(slurm, "requeued", model, steps=10, options=("--spare", "0"))
    job = run.submit()
    run.wait_steps(2)
    (node,) = {run.field(job, "BatchHost")}
    began = time.monotonic()
    hosts.cut(node)
    hosts.freeze(node)
    before = {role: run.starts(role) for role in ("learner", "collector")}
    run.wait(lambda: run.field(job, "Restarts") == "1" and run.state(job) == "RUNNING", "the requeue", 180)
    elsewhere = since(began)
    run.wait(
        lambda: all(run.starts(role) > before[role] for role in before) and (run.logs(job, 1) / "guard.log").exists(),
        "the successors",
    )
    trained = run.trained()
    run.wait_steps(trained + 1)
    went_on = since(began)
    hosts.thaw(node)  # first: what was about to be written is written now, and nobody has been told anything
    time.sleep(3)
    hosts.mend(node)
    run.wait_end(job)
    assert "restarted" not in run.said(), "what was cut off has ended nothing of its successor's"
    superseded = [path.read_text(errors="replace") for path in run.logs(job).glob("*.log")]
    assert any("has taken over" in text for text in superseded) or "has taken over" in run.said(), run.tails()
    finish(run, table, "a node is cut off, no spare: requeued", f"started {elsewhere}, a step {went_on}")


def test_asked_to_end_and_at_the_time_limit_the_run_saves_and_goes_on(slurm: Slurm, model: Path, table: Table) -> None:
    run = SlurmRun(
        slurm,
        "asked",
        model,
        steps=96,  # more than a quick machine trains until Slurm has looked at the limit
        options=("--spare", "0", "--grace", "60"),
        sections=dict(checkpoint=dict(every=100)),
    )
    first = run.submit()
    run.wait_steps(2)
    began = time.monotonic()
    slurm.call("scancel", "--signal=TERM", "--batch", first)
    run.wait_end(first)
    asked = since(began)
    assert run.saved() == [run.trained()], "a checkpoint of the last step, though none was due"
    assert not slurm.call("squeue", "-h").strip(), "who asks for the end gets no new job"

    second = run.submit()
    reached = run.trained()
    run.wait_steps(reached + 2)
    began = time.monotonic()
    slurm.call("scancel", "--signal=TERM", second)
    run.wait_end(second)
    steps_asked = since(began)
    assert run.saved()[-1] == run.trained() > reached

    third = run.submit()
    reached = run.trained()
    run.wait_steps(reached + 1)
    began = time.monotonic()
    # The signal is due 60 s before the end, and Slurm looks every 30 s.
    end = datetime.now() + timedelta(seconds=62)
    slurm.call("scontrol", "update", f"jobid={third}", f"EndTime={end:%Y-%m-%dT%H:%M:%S}")
    run.wait_end(third)
    limit = since(began)
    assert f"submitted job {int(third) + 1}, which goes on" in run.said()
    run.wait_end(str(int(third) + 1))
    finish(run, table, "asked to end (job; steps), the time limit", f"exit 0 after {asked}; {steps_asked}; {limit}")


def test_a_job_for_gpus_is_accepted(slurm: Slurm) -> None:
    """Nodes here have none, which is all that Slurm finds wrong."""
    from tests.cluster.slurm_run import evenkeel_launch

    out = slurm.hosts.shared / "gpus"
    evenkeel_launch(ROOT / "pipeline/recipes/qwen3_32b.yaml", out, "--time", "60", "--sbatch", "--nice=5")
    done = slurm.hosts.run(
        "h1",
        "sbatch",
        "--test-only",
        out / "job.sbatch",
        env=dict(SLURM_CONF=str(slurm.hosts.shared / "slurm/slurm.conf")),
    )
    assert "Invalid generic resource" in done.stderr or "node" in done.stderr.lower(), done.stderr
    assert "unrecognized" not in done.stderr
