"""What happens to hosts in the middle of a run over four of them. Each test is a run of its own.

After each fault the run goes on to its end: no group lost or asked for twice, no token at a wrong version, and a replay
on one machine gives the same weights bit for bit. `make test-cluster` prints a table.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.event_log import read_metrics
from pipeline.data.store import BatchStore
from rollout_sglang.weights.weight_update import GIVE_UP_DEADLINE_S
from tests.cluster.cluster_run import ClusterRun, Layout
from tests.cluster.conftest import ROOT, trained_model
from tests.cluster.rig import Hosts, missing_for

pytestmark = pytest.mark.timeout(1200)
MakeRun = Callable[..., ClusterRun]
Table = list[tuple[str, ...]]
QUARANTINE_DEADLINE_S = 15.0


@pytest.fixture
def make_run(able: None, sorter: Path, tmp_path: Path) -> Iterator[MakeRun]:
    """Makes a run on hosts of its own; the hosts go at the end of the test."""
    with ExitStack() as stack:

        def make(name: str, *, hosts: int = 4, model: Path = sorter, **fields: Any) -> ClusterRun:
            machines = stack.enter_context(Hosts(tmp_path / "shared", keep=[ROOT]))
            return ClusterRun(machines.up(hosts), name, model, tmp_path / "logs", **fields)

        yield make


def finish(run: ClusterRun, table: Table, fault: str, recovered: str, roles: tuple[str, ...] = ()) -> None:
    """To the end of the run, which must be sound; adds its row to the table."""
    end = run.finish(roles=roles)
    same = "bit-identical" if end["bit_identical"] else "DIFFERS"
    table.append((fault, recovered, str(end["lost"]), str(end["duplicated"]), same))
    run.check_sound(end)


def two_more_steps(run: ClusterRun, fault_at: float) -> float:
    """Seconds from the fault to the end of the second step after it: the first may have been under way."""

    def after() -> list[float]:
        return [line["time"] for line in read_metrics(run.path) if line["time"] > fault_at]

    return float(run.wait(lambda: len(after()) >= 2 and sorted(after())[1], "two steps after the fault") - fault_at)


def wait_until_served(run: ClusterRun, index: int, since: float) -> float:
    """Seconds until a verified engine gets requests again."""
    url = run.engine_url(index)
    run.wait(lambda: (run.served(index) or "").isdigit() and url in run.routed(), f"engine {index}", 180)
    return time.time() - since


def test_an_engines_host_loses_power_and_boots_again(make_run: MakeRun, table: Table) -> None:
    run = make_run("power", steps=60)
    run.start_all()
    run.wait_steps(5)
    at = time.time()
    run.hosts.crash("h4")
    goes_on_s = two_more_steps(run, at)
    booted = time.time()
    run.restart_host("h4")
    rejoined_s = wait_until_served(run, 1, booted)
    assert run.trained() < run.steps - 1, "the run ended before the engine was back: give it more steps"
    # The learner's publish may have verified it, and the router know it, before the collector notes that it is back.
    run.wait(lambda: [e for e in run.events("admitted", booted) if e["engine"] == 1], "the event that it is back", 30)
    finish(run, table, "power off an engine's host", f"{goes_on_s:.1f} s")
    finish_row = table.pop()
    table += [
        finish_row,
        ("  … and boot it again: rejoins with a verified version", f"{rejoined_s:.1f} s", "0", "0", ""),
    ]


def test_a_learners_host_loses_power_in_the_middle_of_a_step(make_run: MakeRun, table: Table) -> None:
    run = make_run("learner-power", steps=20)
    run.start_all()
    run.wait_steps(7)
    store = BatchStore(run.path / "batches")
    step = run.wait(lambda: store.next_index > run.trained() and run.trained(), "a batch that is being trained on")
    at = time.time()
    run.hosts.crash("h2")
    run.restart_host("h2")
    run.wait(lambda: any(line["time"] > at and line["step"] > step for line in read_metrics(run.path)), "a new step")
    recovered_s = time.time() - at
    assert any(code != 0 for _, code in run.roles["learner-0"].ends()), "node 0 ended, and was started again"
    finish(
        run, table, "power off a learner's host in the middle of a step", f"{recovered_s:.1f} s, host booted at once"
    )


def test_a_network_is_cut_for_a_minute(make_run: MakeRun, table: Table) -> None:
    run = make_run("cut", steps=110)
    run.start_all()
    run.wait_steps(5)
    at = time.time()
    run.hosts.cut("h4")
    goes_on_s = two_more_steps(run, at)
    run.wait(lambda: [e for e in run.events("quarantined", at) if e["engine"] == 1], "quarantine", 30)
    quarantined_s = next(e for e in run.events("quarantined", at) if e["engine"] == 1)["time"] - at
    assert quarantined_s <= QUARANTINE_DEADLINE_S
    before = run.trained()
    time.sleep(max(0.0, at + 60 - time.time()))
    assert run.trained() >= before + 5, "the run goes on without it"
    restored = time.time()
    run.hosts.mend("h4")
    rejoined_s = wait_until_served(run, 1, restored)
    assert run.trained() < run.steps - 1, "the run ended before the engine was back: give it more steps"
    said = f"{goes_on_s:.1f} s, quarantined {quarantined_s:.1f} s, back {rejoined_s:.1f} s"
    finish(run, table, "cut an engine's host off for 60 s", said)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 million parameters, 80 MB: at 50 Mbit/s they take 13 s."""
    options = [
        "--hidden",
        "512",
        "--layers",
        "6",
        "--heads",
        "8",
        "--kv-heads",
        "4",
        "--head-dim",
        "64",
        "--ffn",
        "1536",
    ]
    return trained_model(tmp_path_factory.mktemp("large"), *options, steps=1)


def test_a_link_is_slow_during_a_publish(make_run: MakeRun, large: Path, table: Table) -> None:
    run = make_run("slow", model=large, steps=12)
    run.start_all()
    run.wait_steps(3)
    at = time.time()
    run.hosts.shape("h4", "50mbit")
    goes_on_s = two_more_steps(run, at)
    run.wait(lambda: [e for e in run.events("quarantined", at) if e["engine"] == 1], "quarantine", 60)
    run.wait_steps(run.trained() + 1)
    run.hosts.shape("h4", "off")
    assert not [e for e in run.events("quarantined", at) if e["engine"] == 0], "the healthy engine was never left out"
    publishes = [line["publish_seconds"] for line in read_metrics(run.path) if line["time"] > at]
    # The healthy engine had the weights when its slow neighbour's time was up (weights.publish_deadline_s). The learner
    # then tries for some seconds to tell the slow one that it was left out.
    slowest = max(seconds["publish_s"] for seconds in publishes)
    assert max(seconds["transfer_s"] for seconds in publishes) <= 8.0 + 2.0
    assert slowest <= 8.0 + GIVE_UP_DEADLINE_S + 4.0, f"a publish took {slowest:.1f} s"
    finish(run, table, "50 Mbit/s to an engine during a publish", f"{goes_on_s:.1f} s, longest publish {slowest:.1f} s")


def test_a_frozen_collector_finds_another_in_its_place(make_run: MakeRun, table: Table) -> None:
    run = make_run("two-collectors", hosts=6, layout=Layout(collector="h5"), steps=25)
    run.start_all()
    run.wait_steps(5)
    at = time.time()
    run.hosts.freeze("h5")
    run.start_collector("h6", "collector-again")
    recovered_s = two_more_steps(run, at)
    thawed = time.time()
    run.hosts.thaw("h5")
    first = run.roles["collector"].keeper
    run.wait(lambda: first.poll() is not None, "the end of the first collector", 60)
    assert first.returncode == 65, run.tails()
    lines = (run.path / "events" / "collector-000001.jsonl").read_text().splitlines()
    late = [line for line in map(json.loads, lines) if line["kind"] == "committed" and line["time"] > thawed]
    assert not late, "it committed nothing more"
    ended_s = time.time() - thawed
    said = f"{recovered_s:.1f} s; the first ended {ended_s:.1f} s after its thaw"
    finish(run, table, "freeze the collector's host, start another, thaw", said, ("learner-0", "collector-again"))
    assert not list(run.path.glob("batches/.*")), "no half file of it"


def test_a_frozen_learner_finds_another_in_its_place(make_run: MakeRun, table: Table) -> None:
    layout = Layout(collector="h5", router="h5")
    run = make_run("two-learners", hosts=6, layout=layout, steps=30)
    run.start_all()
    run.wait_steps(7)
    at = time.time()
    run.hosts.freeze("h1")
    run.start_learner(0, "h6", "learner-0-again")
    before = run.trained()
    run.wait(lambda: run.trained() >= before + 2, "two steps of the second learner", 180)
    recovered_s = time.time() - at
    thawed = time.time()
    version = run.published()
    run.hosts.thaw("h1")
    first = run.roles["learner-0"].keeper
    run.wait(lambda: first.poll() is not None, "the end of the first learner", 60)
    assert first.returncode == 65, run.tails()
    assert run.published() >= version
    said = f"{recovered_s:.1f} s; the first ended {time.time() - thawed:.1f} s after its thaw"
    finish(run, table, "freeze a learner's host, start another, thaw", said, ("learner-0-again", "collector"))


def test_the_run_directory_is_cached_for_30_s(make_run: MakeRun, table: Table) -> None:
    if reason := missing_for("bindfs"):
        pytest.fail(reason, pytrace=False)
    run = make_run("cached", steps=12)
    for host in ("h1", "h2", "h3", "h4"):
        run.hosts.bindfs(host)
    run.start_all()
    run.wait_steps(run.steps, 600)
    metrics = read_metrics(run.path)
    step_s = (metrics[-1]["time"] - metrics[0]["time"]) / (run.steps - 1)
    finish(run, table, "the run directory with 30 s of attribute caching", f"no fault; {step_s:.1f} s a step")
