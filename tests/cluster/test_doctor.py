"""`evenkeel doctor --hosts` between hosts: nothing to find where all is well, and a cache that keeps names for 30 s."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import ROOT
from tests.cluster.rig import HOSTS_SH, Hosts

MUST_HOLD = ("exclusive creation", "replaced file on h2", "h1 connects to h2", "h2 connects to h1")


def doctor(hosts: Hosts, *options: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and findings by name. It is called on this machine and starts its agents on h1 and h2."""
    command = [sys.executable, "-m", "launch.cli", "doctor", "--hosts", "h1,h2", "--via", f"{HOSTS_SH} in {{host}}"]
    environment = hosts.environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--json", *options, str(hosts.shared)], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.stdout, done.stderr
    return done.returncode, {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def longest_delay(check: dict[str, Any]) -> float:
    return max(float(seconds) for seconds in re.findall(r"([\d.]+) s \(", check["found"]))


def test_two_hosts_on_which_all_is_well(hosts: Hosts) -> None:
    code, checks = doctor(hosts)
    assert code == 0, checks
    assert {name: checks[name]["status"] for name in MUST_HOLD} == dict.fromkeys(MUST_HOLD, "ok")
    assert longest_delay(checks["h1 writes, h2 reads"]) < 2.0
    print(json.dumps(checks, indent=1))


def test_a_cut_cable_is_found(hosts: Hosts) -> None:
    hosts.cut("h2")
    try:
        code, checks = doctor(hosts)
    finally:
        hosts.mend("h2")
    assert code == 1
    assert checks["h1 connects to h2"]["status"] == "fail"
    assert checks["exclusive creation"]["status"] == "ok", "the folder does not need the network here"


@pytest.mark.timeout(400)
def test_a_cache_of_thirty_seconds_is_found(able: None, tmp_path: Path) -> None:
    """As an NFS client with attribute caching: late, but nothing that a run rests on is broken."""
    with Hosts(tmp_path / "shared", keep=[ROOT]).up(2) as cached:
        for host in ("h1", "h2"):
            cached.bindfs(host)
        code, checks = doctor(cached)
    print(json.dumps(checks, indent=1))
    late = [checks["h1 writes, h2 reads"], checks["h2 writes, h1 reads"]]
    assert [check["status"] for check in late] == ["warn", "warn"]
    assert all(10.0 < longest_delay(check) <= 60.0 for check in late)
    assert all("attr_timeout" in check["advice"] for check in late)
    assert checks["exclusive creation"]["status"] == "ok"
    assert "fuse" in checks["folder on h2"]["found"]
    assert code == int(any(check["status"] == "fail" for check in checks.values()))
