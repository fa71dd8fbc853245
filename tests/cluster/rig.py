"""Hosts on one machine, for tests: `hosts.sh` as a Python object.

    with Hosts(shared=tmp_path / "shared", keep=[ROOT]).up(4) as hosts:
        hosts.run("h1", "hostname")
        engine = hosts.popen("h3", "evenkeel", "role", "engine", run, "0", "--host", "h3", log=…)
        hosts.crash("h3"); hosts.reboot("h3")

Several sets of hosts may be up at once: each takes a free name and network. They end with the process that made them,
however it ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

HOSTS_SH = Path(__file__).with_name("hosts.sh")
SLURM_SH = Path(__file__).with_name("slurm.sh")
COMMANDS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "pgrep": "procps",
    "bindfs": "bindfs",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
}
"""Command → Debian package."""
_STATE = Path("/run")
_NETWORKS = range(1, 250)
_CAP_SYS_ADMIN = 21


class ClusterError(Exception):
    """What a rig needs is missing, or one of its commands failed."""


def missing_for(*commands: str) -> str | None:
    """What this machine lacks for hosts and `commands`, and what to do; None when nothing is missing."""
    wanted = ("ip", "tc", "nsenter", "unshare", "pgrep", *commands)
    packages = sorted({COMMANDS[command] for command in wanted if _which(command) is None})
    if packages:
        return (
            f"the cluster tests need {', '.join(c for c in wanted if _which(c) is None)}, which this machine lacks; "
            f"apt-get install --yes --no-install-recommends {' '.join(packages)}"
        )
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    capabilities = int(next(line for line in status if line.startswith("CapEff:")).split()[1], 16)
    if os.geteuid() != 0 or not capabilities >> _CAP_SYS_ADMIN & 1:
        return (
            f"the cluster tests make namespaces, which needs root with CAP_SYS_ADMIN; this is user {os.geteuid()} with "
            f"capabilities {capabilities:x}; run them as root, in a container with --privileged"
        )
    made = subprocess.run(
        ["unshare", "--net", "--pid", "--fork", "--mount", "--uts", "--ipc", "--mount-proc", "true"],
        capture_output=True,
        text=True,
    )
    if made.returncode != 0:
        return f"the cluster tests make namespaces, which this machine refuses ({made.stderr.strip()}); use another one"
    if "bindfs" in commands and not Path("/dev/fuse").exists():
        return "the cluster tests mount through FUSE, and /dev/fuse is missing; modprobe fuse, or pass the device on"
    return None


def _which(command: str) -> str | None:
    return shutil.which(command, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


class Hosts:
    """A set of hosts h1…hN; use as a context manager. See hosts.sh for what each method does."""

    def __init__(self, shared: Path, *, keep: Sequence[Path] = (), name: str | None = None) -> None:
        """`keep`: what hosts see beside `shared` although it lies below /tmp, where each has files of its own."""
        self.shared = shared
        self.name, self.number = _free_name() if name is None else (name, _network_of(name))
        self._keep = list(keep)
        self._guard: subprocess.Popen[bytes] | None = None
        self._started: list[subprocess.Popen[bytes]] = []

    def up(self, count: int) -> Self:
        """Start h1…h`count`."""
        if reason := missing_for():
            raise ClusterError(reason)
        self._guard = subprocess.Popen(
            [HOSTS_SH, "guard"], stdin=subprocess.PIPE, env=self.environment(), start_new_session=True
        )
        self._call("up", str(count), str(self.shared), *map(str, self._keep))
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, where: TracebackType | None) -> None:
        self.down()

    def down(self) -> None:
        """End all hosts with everything that runs there. May be called twice."""
        self._call("down")
        for process in self._started:
            process.wait()
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
            self._guard.wait()
        (_STATE / f"{self.name}.network").unlink(missing_ok=True)

    def environment(self) -> dict[str, str]:
        """What hosts.sh and slurm.sh need to know of this set of hosts."""
        path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
        return {**os.environ, "PATH": path, "EK_RIG": self.name, "EK_NET": str(self.number)}

    def address(self, host: str) -> str:
        """The address that a host's name stands for."""
        return f"10.77.{self.number}.{int(host[1:])}"

    def command(self, host: str, *words: str | Path) -> list[str]:
        """The argv that runs `words` on a host; to be started with `environment()`."""
        return [str(HOSTS_SH), "in", host, *map(str, words)]

    def run(self, host: str, *words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end. `options` as for subprocess.run."""
        settings: dict[str, Any] = dict(capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)
        settings |= options
        settings["env"] = self.environment() | dict(options.get("env") or {})
        return subprocess.run(self.command(host, *words), **settings)

    def popen(
        self, host: str, *words: str | Path, log: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host; its output is appended to `log`. It ends with its host at the latest."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                self.command(host, *words),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment() | dict(env or {}),
                cwd=cwd,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def processes(self, host: str) -> list[int]:
        """The processes of a host, as this machine numbers them."""
        return [int(pid) for pid in self._call("processes", host).split()]

    def cut(self, host: str) -> None:
        """Take the cable out: connections hang."""
        self._call("cut", host)

    def mend(self, host: str) -> None:
        """Put the cable back."""
        self._call("mend", host)

    def crash(self, host: str) -> None:
        """Power off: all processes die at once, and nobody is told."""
        self._call("crash", host)

    def reboot(self, host: str) -> None:
        """Start a host again that crashed. Nothing runs there."""
        self._call("reboot", host)

    def shape(self, host: str, rate: str) -> None:
        """Limit the link in both directions: `50mbit`, or `off`."""
        self._call("shape", host, rate)

    def freeze(self, host: str) -> None:
        """Stop all processes of a host, without a signal that they could see."""
        self._call("freeze", host)

    def thaw(self, host: str) -> None:
        """Let the processes of a frozen host go on."""
        self._call("thaw", host)

    def bindfs(self, host: str) -> None:
        """From now on the host sees the shared directory through FUSE, which keeps attributes and names for 30 s."""
        if reason := missing_for("bindfs"):
            raise ClusterError(reason)
        self._call("bindfs", host)

    def _call(self, *words: str) -> str:
        done = subprocess.run([HOSTS_SH, *words], capture_output=True, text=True, env=self.environment())
        if done.returncode != 0:
            raise ClusterError(f"hosts.sh {' '.join(words)} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout


class Slurm:
    """A real Slurm over hosts that are up: slurmctld on h1, slurmd on the others."""

    def __init__(self, hosts: Hosts) -> None:
        if reason := missing_for("slurmctld", "slurmd", "srun"):
            raise ClusterError(reason)
        self.hosts = hosts

    def up(self) -> Self:
        """Returns when all nodes are idle."""
        self.call("up")
        return self

    def restart(self, host: str) -> None:
        """Start slurmd on a host that was rebooted."""
        self.call("restart", host)

    def down(self) -> None:
        """End the daemons."""
        self.call("down")

    def call(self, *words: str, deadline_s: float = 120.0) -> str:
        """A client's command on h1 (`sinfo`, `sbatch …`); returns its output."""
        done = subprocess.run(
            [SLURM_SH, *words], capture_output=True, text=True, env=self.hosts.environment(), timeout=deadline_s
        )
        if done.returncode != 0:
            raise ClusterError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout


def _free_name() -> tuple[str, int]:
    """A name whose network no other set of hosts has. The file of it goes with `down`."""
    for number in _NETWORKS:
        name = f"ek{number}"
        claim = _STATE / f"{name}.network"
        if claim.exists() and not _alive(claim.read_text()):
            claim.unlink(missing_ok=True)  # its owner was killed; `up` clears what it left
        try:
            with claim.open("x") as file:
                file.write(f"{os.getpid()} {_started(os.getpid())}")
            return name, number
        except FileExistsError:
            continue
    raise ClusterError(f"all networks 10.77.1 … 10.77.{_NETWORKS[-1]} are taken; remove /run/ek*.network of dead runs")


def _network_of(name: str) -> int:
    if not name.removeprefix("ek").isdigit():
        raise ClusterError(f"hosts are named {name!r}, expected ek and a number such as ek12")
    return int(name.removeprefix("ek"))


def _alive(owner: str) -> bool:
    pid, started = owner.split() if len(owner.split()) == 2 else ("0", "")
    return _started(int(pid)) == started != ""


def _started(pid: int) -> str:
    """When a process began, in the kernel's ticks; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except FileNotFoundError:
        return ""


if __name__ == "__main__":
    print(missing_for("bindfs", "slurmctld", "slurmd", "srun") or "this machine can run the cluster tests")
    sys.exit(missing_for("bindfs", "slurmctld", "slurmd", "srun") is not None)
