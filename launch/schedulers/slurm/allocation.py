"""What the batch script asks of Slurm: which nodes are up, signals for a step, the job again.

Slurm's controller may be away for minutes, for a restart or an upgrade, and the run goes on meanwhile. So questions are
answered with what was last known, and only orders that the run depends on fail.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from launch.run.addresses import LOOPBACK, first_address, is_loopback, own_address_towards
from pipeline.errors import FatalError, RetryableError, SupersededError

DEADLINE_S = 60
ASK_PAUSE_S = 5.0
"""Before Slurm's controller, which gave no answer, is asked again."""
_GONE = ("down", "fail", "*", "unknown", "powered", "powering", "reboot")
"""In the state of a node on which nothing can be started; `*`: it does not answer."""
_OF_THE_USER = ("SLURM_CONF", "SLURM_CLUSTERS")


class SlurmError(RetryableError):
    """A command of Slurm's failed."""


@dataclass
class Allocation:
    """The nodes of this job, and orders about it."""

    job: str
    restart: int
    """How often Slurm has requeued the job."""
    batch_host: str
    cpus_per_node: int
    """Of the node with the fewest."""
    threads_per_core: int = 2
    """The most of any node, once Slurm has said it: steps are charged whole cores."""
    draining: frozenset[str] = frozenset()
    """Of the nodes that are up, those that are to get no further job: by an administrator, or by a health check that
    found a fault."""
    _last_known: list[str] = field(default_factory=list)
    _node_addresses: dict[str, str] = field(default_factory=dict)
    """NodeAddr of each, a name or an address."""

    @staticmethod
    def of(environment: Mapping[str, str]) -> Allocation:
        """From what Slurm gives to a batch script. Raises FatalError outside of one."""
        try:
            job, host = environment["SLURM_JOB_ID"], environment["SLURMD_NODENAME"]
        except KeyError as error:
            raise FatalError(
                f"{error.args[0]} is not set, so this is no batch script of Slurm's; submit job.sbatch with sbatch"
            ) from error
        if "SLURM_ARRAY_JOB_ID" in environment:
            raise FatalError(
                "this job is an array (sbatch --array), and all its tasks would train the same run; submit job.sbatch "
                "without it, and give each run a recipe and a folder of its own"
            )
        restart = int(environment.get("SLURM_RESTART_COUNT") or 0)
        counts = environment.get("SLURM_JOB_CPUS_PER_NODE") or environment.get("SLURM_CPUS_ON_NODE") or "1"
        # Nodes alike stand together, as in 190(x3),128.
        return Allocation(job, restart, host, min(int(count.partition("(")[0]) for count in counts.split(",")))

    @property
    def name(self) -> str:
        """Of this attempt: `slurm-1234-0`."""
        return f"slurm-{self.job}-{self.restart}"

    def up(self) -> list[str]:
        """Nodes of the job on which something can be started: the batch script's first, those that are draining last.
        Raises SupersededError when Slurm has started the job again: these nodes are the successor's."""
        try:
            nodes = ask("scontrol", "show", "hostnames", self._current()["NodeList"])
            states = ask("sinfo", "-a", "-h", "-N", "-n", ",".join(nodes.split()), "-o", "%N %T %Z %o")
        except SlurmError as error:
            if not self._last_known:
                raise
            print(f"warning: {error}; the nodes are taken to be those of before", file=sys.stderr, flush=True)
            return self._last_known
        lines = [line.split() for line in states.splitlines()]
        said = {node: word for node, word, _, _ in lines}
        self.threads_per_core = max((int(threads) for _, _, threads, _ in lines), default=self.threads_per_core)
        self._node_addresses = {node: address for node, _, _, address in lines}
        # One that sinfo does not list is of a partition that it hides from this user, and is the job's all the same.
        state = {node: said.get(node, "idle") for node in nodes.split()}
        up = [node for node, word in state.items() if not any(sign in word for sign in _GONE)]
        self.draining = frozenset(node for node in up if "drain" in state[node])
        self._last_known = sorted(up, key=lambda node: (node in self.draining, node != self.batch_host))
        return self._last_known

    def _current(self) -> dict[str, str]:
        """What Slurm says of this job. Raises SupersededError, SlurmError."""
        words = ask("scontrol", "--oneliner", "show", "job", self.job).split()
        fields = dict(word.split("=", 1) for word in reversed(words) if "=" in word)
        if int(fields["Restarts"]) != self.restart:
            raise SupersededError(
                f"job {self.job} was started again (restart {fields['Restarts']}) while this node was cut off; attempt "
                f"{self.restart} ends"
            )
        return fields

    def address(self, node: str) -> str:
        """Where the other nodes reach a node: what its name leads to, or else its NodeAddr.

        Not the name itself, which a node may have at 127.0.1.1 in its own /etc/hosts. Of a node that is known by no
        better name here, the address from which it reaches another one; a job on one node needs loopback alone.
        """
        for name in (node, self._node_addresses.get(node, node)):
            with suppress(OSError):
                if not is_loopback(address := first_address(name)):
                    return address
        if node != self.batch_host:
            return node
        for other in self._last_known:
            with suppress(OSError):
                if not is_loopback(address := own_address_towards(first_address(other))):
                    return address
        return LOOPBACK if self._last_known == [node] else node

    def is_up(self, node: str) -> bool:
        """Whether the node is one of those."""
        return node in self.up()

    def is_preempted(self) -> bool:
        """Whether Slurm has told this job to make room, and ends it after its grace time. Raises SupersededError,
        SlurmError."""
        return self._current().get("PreemptTime", "None") != "None"  # no such field where nothing is ever preempted

    def step(self, name: str) -> str | None:
        """JOBID.STEP of the step of that name; None before srun has made it, and when it is gone."""
        listed = ask("squeue", "-a", "-h", "--steps", "-j", self.job, "-o", "%i %j")
        return next((words[0] for words in map(str.split, listed.splitlines()) if words[1:] == [name]), None)

    def signal(self, step: str, signal: str) -> None:
        """Send a signal to all processes of one step. The controller is asked: straight to a node, scancel of Slurm
        22.05 delivers SIGTERM and then reports an error."""
        ask("scancel", "--ctld", f"--signal={signal}", step)

    def requeue(self) -> None:
        """End this job and queue it again; Slurm ends this process. Raises SupersededError when it already was."""
        self._current()
        ask("scontrol", "requeue", self.job)

    def submit_next(self, script: Path) -> str:
        """Submit the same script as a job that begins when this one has ended; returns its id."""
        return ask("sbatch", "--parsable", f"--dependency=afterany:{self.job}", str(script)).strip()

    def step_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Without what Slurm told the batch script: srun would read the job's GPUs, tasks and memory as wishes for each
        step."""
        kept = {
            name: value
            for name, value in environment.items()
            if not name.startswith(("SLURM_", "SLURMD_", "SBATCH_", "SRUN_")) or name in _OF_THE_USER
        }
        return {**kept, "SLURM_JOB_ID": self.job, "SLURM_EXPORT_ENV": "ALL"}


def ask(*command: str) -> str:
    """Run a command of Slurm's to its end; returns its output. Raises SlurmError."""
    # A job that is submitted from within a job must not inherit the first one's wishes.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") or k in _OF_THE_USER}
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=DEADLINE_S, env=environment
        )
    except FileNotFoundError as error:
        raise FatalError(f"{command[0]} is not on the PATH; the batch script needs Slurm's commands") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{_shown(command)} did not answer within {DEADLINE_S} s") from error
    if done.returncode:
        raise SlurmError(f"{_shown(command)} ended with {done.returncode}: {' '.join(done.stderr.split())}")
    return done.stdout


def _shown(command: Sequence[str]) -> str:
    return " ".join(command)
