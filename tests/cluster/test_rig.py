"""The hosts themselves: what they share and what not, and that each fault is one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.conftest import ROOT
from tests.cluster.rig import Hosts, Slurm, missing_for

ANSWER = """
import socket, sys
server = socket.create_server((sys.argv[1], 7000))
while True:
    connection, _ = server.accept()
    connection.sendall(b"x" * int(sys.argv[2]))
    connection.close()
"""
ASK = """
import socket, sys, time
began = time.monotonic()
with socket.create_connection((sys.argv[1], 7000), timeout=3) as connection:
    received = 0
    while data := connection.recv(1 << 20):
        received += len(data)
print(received, time.monotonic() - began)
"""


def wait_for(condition: Callable[[], object], what: str, deadline_s: float = 20.0) -> None:
    give_up = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < give_up, f"waited {deadline_s} s for {what}"
        time.sleep(0.05)


def ask(hosts: Hosts, here: str, there: str) -> subprocess.CompletedProcess[str]:
    return hosts.run(here, sys.executable, "-c", ASK, there)


def seconds(hosts: Hosts, here: str, there: str) -> float:
    done = ask(hosts, here, there)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.split()[1])


def test_hosts_share_the_directory_and_the_network_alone(hosts: Hosts, tmp_path: Path) -> None:
    assert [hosts.run(host, "hostname").stdout.strip() for host in ("h1", "h4")] == ["h1", "h4"]
    hosts.run("h1", "touch", hosts.shared / "file", "/tmp/mine", "/dev/shm/mine", "/var/tmp/mine", check=True)
    seen = hosts.run("h2", "ls", hosts.shared / "file", "/tmp/mine", "/dev/shm/mine", "/var/tmp/mine")
    assert seen.stdout.split() == [str(hosts.shared / "file")]
    hosts.popen("h1", "sleep", "1000", log=tmp_path / "log")
    wait_for(lambda: "sleep" in hosts.run("h1", "ps", "-eo", "args").stdout, "the process")
    assert "sleep 1000" not in hosts.run("h2", "ps", "-eo", "args").stdout
    assert hosts.run("h1", "getent", "hosts", "h3").stdout.split()[0] == hosts.address("h3")


def test_links_are_cut_and_shaped(hosts: Hosts, tmp_path: Path) -> None:
    hosts.popen("h3", sys.executable, "-c", ANSWER, "h3", str(4 << 20), log=tmp_path / "log")
    wait_for(lambda: ask(hosts, "h1", "h3").returncode == 0, "a server")
    assert seconds(hosts, "h1", "h3") < 0.3
    hosts.shape("h3", "50mbit")
    assert seconds(hosts, "h1", "h3") > 0.5, "4 MiB at 50 Mbit/s take 0.67 s"
    hosts.shape("h3", "off")
    assert seconds(hosts, "h1", "h3") < 0.3
    hosts.cut("h3")
    assert "TimeoutError" in ask(hosts, "h1", "h3").stderr
    hosts.mend("h3")
    wait_for(lambda: ask(hosts, "h1", "h3").returncode == 0, "the mended link")


def test_a_frozen_host_stands_still_and_goes_on(hosts: Hosts, tmp_path: Path) -> None:
    beat = hosts.shared / "beat"
    script = f"for i in $(seq 1000000); do echo $i >>{beat}; sleep 0.02; done"
    process = hosts.popen("h2", "bash", "-c", script, log=tmp_path / "log")
    wait_for(beat.exists, "a beat")
    hosts.freeze("h2")
    before = beat.stat().st_size
    time.sleep(0.3)
    assert beat.stat().st_size == before
    hosts.thaw("h2")
    wait_for(lambda: beat.stat().st_size > before, "another beat")
    hosts.run("h2", "bash", "-c", "kill -KILL -1")
    assert process.wait(10) != 0, "the process that waits here goes on too"


def test_a_crashed_host_is_gone_and_boots_empty(hosts: Hosts, tmp_path: Path) -> None:
    process = hosts.popen("h4", "sleep", "1000", log=tmp_path / "log")
    wait_for(lambda: len(hosts.processes("h4")) > 2, "the process")
    pids = hosts.processes("h4")
    hosts.crash("h4")
    assert process.wait(10) != 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    hosts.reboot("h4")
    assert "sleep 1000" not in hosts.run("h4", "ps", "-eo", "args").stdout
    assert hosts.run("h4", "ls", hosts.shared).returncode == 0
    hosts.popen("h4", sys.executable, "-c", ANSWER, "h4", "1", log=tmp_path / "log")
    wait_for(lambda: ask(hosts, "h1", "h4").returncode == 0, "the rebooted host on the network")


def test_a_frozen_host_can_be_switched_off(hosts: Hosts, tmp_path: Path) -> None:
    process = hosts.popen("h3", "sleep", "1000", log=tmp_path / "log")
    wait_for(lambda: "sleep 1000" in hosts.run("h3", "ps", "-eo", "args").stdout, "the process")
    hosts.freeze("h3")
    hosts.crash("h3")
    assert process.wait(10) != 0
    hosts.reboot("h3")


def test_bindfs_keeps_what_it_has_seen(hosts: Hosts) -> None:
    if reason := missing_for("bindfs"):
        pytest.fail(reason, pytrace=False)
    hosts.bindfs("h2")
    file = hosts.shared / "late"
    assert hosts.run("h2", "test", "-e", file).returncode == 1
    file.write_text("here")
    assert hosts.run("h1", "test", "-e", file).returncode == 0
    assert hosts.run("h2", "test", "-e", file).returncode == 1, "h2 goes on believing that the file is missing"
    assert "late" in hosts.run("h2", "ls", hosts.shared).stdout, "a listing is not kept"


def test_two_sets_of_hosts_are_up_at_once(hosts: Hosts, tmp_path: Path) -> None:
    with Hosts(tmp_path / "other").up(1) as other:
        assert other.name != hosts.name
        assert other.address("h1") != hosts.address("h1")
        assert other.run("h1", "hostname").stdout.strip() == "h1"
    assert hosts.run("h1", "hostname").stdout.strip() == "h1"
    other.down()


def test_hosts_end_with_the_process_that_made_them(able: None, tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from tests.cluster.rig import Hosts\n"
        f"hosts = Hosts(Path({str(tmp_path / 'shared')!r})).up(1)\n"
        "print(hosts.name, *hosts.processes('h1'), flush=True); time.sleep(1000)"
    )
    maker = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert maker.stdout is not None
    with maker.stdout:
        name, *pids = maker.stdout.readline().decode().split()
    assert pids
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    wait_for(lambda: not Path(f"/run/{name}").exists(), "the end of the hosts")
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the end of their processes")
    assert not Path(f"/run/netns/{name}-h1").exists()
    Path(f"/run/{name}.network").unlink()


def test_slurm_runs_a_step_on_each_node(hosts: Hosts) -> None:
    if reason := missing_for("slurmctld", "slurmd", "srun"):
        pytest.fail(reason, pytrace=False)
    slurm = Slurm(hosts).up()
    try:
        assert sorted(slurm.call("srun", "-N3", "hostname").split()) == ["h2", "h3", "h4"]
    finally:
        slurm.down()
