"""Two agents of this machine: the program that runs on each host, over its own pipes, with what it measures."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.doctor import agent, hosts
from launch.doctor.hosts import Agent, Host, HostError, Visit, check_hosts, diagnose_hosts
from launch.doctor.machine import Check
from tests.support.processes import unkillable

HERE = "env HOST={host}"
PAIR = [Host("a", "127.0.0.1"), Host("b", "127.0.0.1")]
MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro
40 22 0:40 / /mnt/my\\040runs rw,noatime shared:9 master:2 - nfs4 server:/runs rw,vers=4.2,acregmax=60
41 22 0:41 / /mnt rw - tmpfs tmpfs rw,size=1g
"""


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in dict(RACE_ROUNDS=10, RACE_STARTS_IN_S=0.1).items():
        monkeypatch.setattr(hosts, name, value)


def named(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_a_module_of_the_users_hides_none_of_ours_from_an_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the folder that `--via` starts it in."""
    (tmp_path / "launch.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    with Agent(PAIR[0], HERE) as running:
        assert running.ask("look", folder=str(tmp_path))["kind"]


def test_two_hosts_with_one_folder(tmp_path: Path) -> None:
    checks = named(diagnose_hosts(PAIR, tmp_path, HERE, ports=(0,)))
    assert {"folder on b", "a writes, b reads", "b writes, a reads", "exclusive creation"} <= set(checks)
    assert {"a connects to b", "b connects to a"} <= set(checks)
    assert checks["exclusive creation"].found.startswith("10 races by hard link, one winner each")
    must = {name: check.status for name, check in checks.items() if not name.startswith("folder")}
    assert set(must.values()) == {"ok"}, checks
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_not_one_are_found(tmp_path: Path) -> None:
    """The second agent looks below another folder: as if the first one's were not mounted there."""
    (tmp_path / "b").mkdir()

    class Elsewhere(Agent):
        def ask(self, do: str, **order: Any) -> dict[str, Any]:
            moved = {key: str(value).replace("/shared/", "/other/") for key, value in order.items() if key == "folder"}
            return super().ask(do, **{**order, **moved})

    with Agent(PAIR[0], HERE) as first, Elsewhere(PAIR[1], HERE) as second:
        checks = named(Visit([first, second], tmp_path / "shared" / "run", (0,), 0.3).checks())
    assert checks["a writes, b reads"].status == "fail"
    assert "one shared file system" in checks["a writes, b reads"].advice
    assert "exclusive creation" not in checks


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("a", "give two or more different hosts"),
        ("a,a", "give two or more different hosts"),
        ("a,", "expected NAME or NAME=ADDRESS"),
    ],
)
def test_what_cannot_be_meant(tmp_path: Path, given: str, said: str) -> None:
    with pytest.raises(HostError, match=said):
        check_hosts(given, tmp_path, True, HERE, None, "0", 1.0)


@pytest.mark.parametrize("via", ["ssh {0}", "ssh {name}", "ssh {host.name}", "ssh {host", "ssh 'x"])
def test_a_via_that_is_no_command(tmp_path: Path, via: str) -> None:
    with pytest.raises(HostError, match=f"^--via is {re.escape(repr(via))}, expected a command with {{host}} in it"):
        check_hosts("a,b", tmp_path, True, via, None, "29500", 1.0)


@pytest.mark.parametrize(
    ("via", "said"),
    [
        ("no-such-program-here {host}", "no-such-program-here a .* cannot be started"),
        (f"{sys.executable} -c 'import sys; sys.exit(\"no route to {{host}}\")'", r"ended \(no route to a\)"),
        ("sleep 60 #", "did not answer `look` within"),
    ],
)
def test_a_host_that_cannot_be_asked_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, via: str, said: str
) -> None:
    if via.startswith("sleep"):
        monkeypatch.setattr(Agent.ask, "__kwdefaults__", {"deadline_s": 0.5})
        monkeypatch.setattr("launch.doctor.hosts._STOP_S", 0.1)
        via = f"{sys.executable} -c 'import time; time.sleep(60)'"
    [check] = diagnose_hosts(PAIR, tmp_path, via)
    assert check.status == "fail"
    assert re.search(said, check.found), check.found
    assert "\n" not in check.found


def test_nobody_waits_for_ever_for_a_program_that_cannot_be_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("launch.doctor.hosts._STOP_S", 0.1)
    running = Agent(PAIR[0], f"{sys.executable} -c 'import time; time.sleep(60)'")
    with unkillable(running._process):
        running.close()
    running.close()  # its streams, now that it has ended
    assert "was killed and has not ended" in capsys.readouterr().err


def test_the_file_system_of_a_folder() -> None:
    assert agent.mount_of(Path("/mnt/my runs/demo"), MOUNTS) == ("nfs4", "rw,noatime,rw,vers=4.2,acregmax=60")
    assert agent.mount_of(Path("/mnt/other"), MOUNTS)[0] == "tmpfs"
    assert agent.mount_of(Path("/mntx"), MOUNTS)[0] == "ext4"
    over = MOUNTS + "50 41 0:50 / /mnt rw - fuse bindfs rw\n"
    assert agent.mount_of(Path("/mnt/other"), over)[0] == "fuse"


def test_judgements() -> None:
    assert hosts.judge_exclusive(2, [{0}, {1}]).status == "ok"
    assert "1 had several winners, 0 had none" in hosts.judge_exclusive(2, [{0, 1}, {1}]).found
    assert "0 had several winners, 1 had none" in hosts.judge_exclusive(2, [{0}, set()]).found
    late = hosts.judge_visibility("a", "b", {"open new": 0.2, "list new": 29.5}, 60)
    assert (late.status, "actimeo" in late.advice) == ("warn", True)
    assert hosts.judge_visibility("a", "b", {"open new": 0.2, "list new": 1.5}, 60).status == "ok"
    assert hosts.judge_visibility("a", "b", {"open new": None}, 60).status == "fail"
