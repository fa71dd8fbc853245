"""Run each role as a job step, one `srun` on one node, and ask Slurm about the job.

A step is named after its unit, attempt and start (`learner-1.0.2`), and signals find it by this name: srun itself would
answer SIGTERM by killing the step.

A requeued job keeps its number, and its steps are numbered from 0 again. An attempt that was cut off must not end its
successor's steps, so step names contain the attempt, and srun never ends a step by number: it is ended by SIGKILL,
which it cannot handle, and runs with --kill-on-bad-exit=0.

Slurm's controller may be away for minutes, for a restart or an upgrade, while the run goes on. Questions are then
answered from the last known state, and only orders that the run depends on fail.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from launch.build.api_key import API_KEY_VARIABLE, without_teacher_key
from launch.run.addresses import LOOPBACK, first_address, is_loopback, own_address_towards
from launch.run.starter import Unit
from launch.schedulers.slurm.placement import Shape, moved, place
from pipeline.child_process import ChildProcess
from pipeline.errors import STOPPED_EXIT_CODE, FatalError, RetryableError, SupersededError

NODE_DIED = 128 + signal.SIGKILL
"""Exit status of a step whose node died, as if SIGKILL had ended it; srun has no such status."""
KILL_S = 15
"""Longest wait for a killed step to disappear. A step on a lost node stays listed until Slurm notices."""
AT_ONCE_S = 600
"""Seconds within which roles end that were asked at the same moment: some save first."""
_POLL_S = 0.5
DEADLINE_S = 60
ASK_PAUSE_S = 5.0
"""Seconds before an unanswered question to Slurm's controller is repeated."""
_GONE = ("down", "fail", "*", "unknown", "powered", "powering", "reboot")
"""Words in the state of a node that cannot start a step; `*` means that the node does not answer."""
_OF_THE_USER = ("SLURM_CONF", "SLURM_CLUSTERS")


class SlurmError(RetryableError):
    """A Slurm command failed."""


@dataclass
class Allocation:
    job: str
    restart: int
    """How often Slurm has requeued the job."""
    batch_host: str
    cpus_per_node: int
    """The fewest of any node."""
    threads_per_core: int = 2
    """Most threads per core of any node, updated from Slurm: steps are charged whole cores."""
    draining: frozenset[str] = frozenset()
    """Nodes that are up but get no further job, by an administrator or by a failed health check."""
    _last_known: list[str] = field(default_factory=list)
    _node_addresses: dict[str, str] = field(default_factory=dict)
    """A name or an address, by node."""
    name: str = field(init=False)
    """The attempt's name, such as `slurm-1234-0`."""

    def __post_init__(self) -> None:
        self.name = f"slurm-{self.job}-{self.restart}"

    @staticmethod
    def of(environment: Mapping[str, str]) -> Allocation:
        """Read Slurm's environment of a batch script. Raises FatalError outside of one."""
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
        # Equal nodes are grouped, as in 190(x3),128.
        return Allocation(job, restart, host, min(int(count.partition("(")[0]) for count in counts.split(",")))

    def up(self) -> list[str]:
        """Return the nodes that can start steps: the batch script's first, draining nodes last. Raises SupersededError
        when Slurm has started the job again, to which the nodes now belong."""
        try:
            nodes = run_slurm("scontrol", "show", "hostnames", self._current()["NodeList"])
            states = run_slurm("sinfo", "-a", "-h", "-N", "-n", ",".join(nodes.split()), "-o", "%N %T %Z %o")
        except SlurmError as error:
            if not self._last_known:
                raise
            print(f"warning: {error}; the nodes are taken to be those of before", file=sys.stderr, flush=True)
            return self._last_known
        lines = [line.split() for line in states.splitlines()]
        said = {node: word for node, word, _, _ in lines}
        self.threads_per_core = max((int(threads) for _, _, threads, _ in lines), default=self.threads_per_core)
        self._node_addresses = {node: address for node, _, _, address in lines}
        # sinfo omits nodes of partitions hidden from this user; such a node still belongs to the job.
        state = {node: said.get(node, "idle") for node in nodes.split()}
        up = [node for node, word in state.items() if not any(sign in word for sign in _GONE)]
        self.draining = frozenset(node for node in up if "drain" in state[node])
        self._last_known = sorted(up, key=lambda node: (node in self.draining, node != self.batch_host))
        return self._last_known

    def _current(self) -> dict[str, str]:
        """Return Slurm's fields about this job. Raises SupersededError, SlurmError."""
        words = run_slurm("scontrol", "--oneliner", "show", "job", self.job).split()
        fields = dict(word.split("=", 1) for word in reversed(words) if "=" in word)
        if int(fields["Restarts"]) != self.restart:
            raise SupersededError(
                f"job {self.job} was started again (restart {fields['Restarts']}) while this node was cut off; attempt "
                f"{self.restart} ends"
            )
        return fields

    def address(self, node: str) -> str:
        """Return the address at which other nodes reach a node: by its name, or else by its NodeAddr. The name itself
        does not do: a node's /etc/hosts may map it to 127.0.1.1. When only loopback is found for this node, return the
        address from which it reaches another node; a job on one node uses loopback."""
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

    def is_preempted(self) -> bool:
        """Return whether Slurm preempts this job. Raises SupersededError, SlurmError."""
        return self._current().get("PreemptTime", "None") != "None"  # Slurm without preemption omits the field

    def step(self, name: str) -> str | None:
        """Return JOBID.STEP of the step with this name, or None before srun has created it and after it ends."""
        listed = run_slurm("squeue", "-a", "-h", "--steps", "-j", self.job, "-o", "%i %j")
        return next((words[0] for words in map(str.split, listed.splitlines()) if words[1:] == [name]), None)

    def signal(self, step: str, signal: str) -> None:
        """Signal a step's processes through the controller: directly, scancel of Slurm 22.05 reports an error."""
        run_slurm("scancel", "--ctld", f"--signal={signal}", step)

    def requeue(self) -> None:
        """Requeue this job; Slurm ends this process. Raises SupersededError when the job was already requeued."""
        self._current()
        run_slurm("scontrol", "requeue", self.job)

    def submit_next(self, script: Path) -> str:
        """Submit the script as a job that starts after this one, and return its id."""
        return run_slurm("sbatch", "--parsable", f"--dependency=afterany:{self.job}", str(script)).strip()

    def step_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Remove the batch script's variables, which srun would read as requests for the resources of each step."""
        kept = {
            name: value
            for name, value in environment.items()
            if not name.startswith(("SLURM_", "SLURMD_", "SBATCH_", "SRUN_")) or name in _OF_THE_USER
        }
        return {**kept, "SLURM_JOB_ID": self.job, "SLURM_EXPORT_ENV": "ALL"}


def run_slurm(*command: str) -> str:
    """Run a Slurm command to its end and return its output. Raises SlurmError."""
    # A job submitted from within a job must not inherit its requests.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") or k in _OF_THE_USER}
    environment.pop(API_KEY_VARIABLE, None)  # Slurm stores the environment
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=DEADLINE_S, env=environment
        )
    except FileNotFoundError as error:
        raise FatalError(f"{command[0]} is not on the PATH; the batch script needs Slurm's commands") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{' '.join(command)} did not answer within {DEADLINE_S} s") from error
    if done.returncode:
        raise SlurmError(f"{' '.join(command)} ended with {done.returncode}: {' '.join(done.stderr.split())}")
    return done.stdout


@dataclass(frozen=True)
class Images:
    learner: str | None = None
    rollout: str | None = None
    mounts: str | None = None

    def options(self, unit: Unit) -> list[str]:
        image = self.rollout if unit.role in ("engine", "router") else self.learner
        if image is None:
            return []
        mounts = [f"--container-mounts={self.mounts}"] if self.mounts else []
        return [f"--container-image={image}", *mounts, f"--container-workdir={Path.cwd()}"]


class Srun(ChildProcess):
    """The srun process of a step. When this program dies, Slurm ends the steps together with the batch script."""

    when_parent_dies = signal.SIGKILL


@dataclass
class Step:
    """A role running as a job step; its srun process is a child of this process."""

    allocation: Allocation
    name: str
    host: str
    client: Srun
    on_end: Callable[[Step], None]
    asked: bool = False
    status: int | None = None
    _ask_at: float = math.inf
    """When to repeat an unanswered request to end."""

    @property
    def log(self) -> Path | None:
        return self.client.log

    def poll(self) -> int | None:
        """Return the role's exit status, or None while it runs."""
        if self.status is None and (status := self.client.poll()) is not None:
            # srun exits with 0 when the node of its step dies.
            self.status = NODE_DIED if status == 0 and self.host not in self.allocation.up() else status
            self.on_end(self)
        elif self.status is None and time.monotonic() >= self._ask_at:
            self._ask_to_end()
        return self.status

    def terminate(self) -> None:
        """Ask the role to end in order, without waiting. A step that Slurm has not created yet is killed."""
        if self.poll() is not None:
            return
        self.asked = True
        self._ask_to_end()

    def _ask_to_end(self) -> None:
        self._ask_at = math.inf
        try:
            if (step := self.allocation.step(self.name)) is None:
                self.client.kill()
            else:
                self.allocation.signal(step, "TERM")
        except SlurmError as error:  # the controller may be restarting; `poll` asks again
            print(f"warning: {error}; {self.name} is asked to end again", file=sys.stderr, flush=True)
            self._ask_at = time.monotonic() + ASK_PAUSE_S

    def kill(self) -> None:
        self.asked = True
        give_up = time.monotonic() + KILL_S
        with suppress(SlurmError):
            while (step := self.allocation.step(self.name)) is not None and time.monotonic() < give_up:
                self.allocation.signal(step, "KILL")
                time.sleep(_POLL_S)
        self.client.kill()


@dataclass
class SrunStarter:
    """A starter of units on nodes that are up. A unit stays on its node while that is up. A restarted unit leaves a
    draining node if another has room, since a fault of the node may have ended it."""

    allocation: Allocation
    shape: Shape
    command: Callable[[Unit, str], list[str]]
    """Returns the command of a unit on a host."""
    environment: Mapping[str, str]
    images: Images = Images()
    places: dict[Unit, str] = field(default_factory=dict)
    starts: Counter[Unit] = field(default_factory=Counter)
    _orderly: list[tuple[float, str]] = field(default_factory=list)
    """Times and hosts of orderly ends that this program did not ask for."""

    def asked_from_outside(self) -> bool:
        """Return whether roles on several nodes ended in order without our request: `scancel --signal=TERM JOB`, and
        Slurm before a preemption, signal steps but not the batch script. On one node of several, the node shut down."""
        now = time.monotonic()
        self._orderly = [(when, host) for when, host in self._orderly if now - when < AT_ONCE_S]
        return len({host for _, host in self._orderly}) >= min(2, len(set(self.places.values())) or 1)

    def _ended(self, step: Step) -> None:
        if step.status == STOPPED_EXIT_CODE and not step.asked:
            self._orderly.append((time.monotonic(), step.host))

    def start(self, unit: Unit, log: Path) -> Step:
        """Start a unit, on another node if its node is gone. Raises NoRoomError when too few nodes are up."""
        before, up, draining = self.places, self.allocation.up(), self.allocation.draining
        if before.get(unit) not in up:
            self.places = place(self.shape, up, before)
        elif before[unit] in draining:
            self.places = moved(self.shape, unit, [node for node in up if node not in draining], before)
        for one in (one for one in before if before[one] != self.places[one]):
            print(f"{one.name} moves from {before[one]} to {self.places[one]}", flush=True)
        host = self.places[unit]
        self.starts[unit] += 1
        name = f"{unit.name}.{self.allocation.restart}.{self.starts[unit]}"
        srun = [*self.srun_options(unit, host, name), *self.command(unit, host)]
        given = self.environment if unit.role == "collector" else without_teacher_key(self.environment)
        environment = self.allocation.step_environment(given)
        client = Srun(srun, log, environment, own_session=True)
        return Step(self.allocation, name, host, client, self._ended)

    def srun_options(self, unit: Unit, host: str, name: str) -> list[str]:
        """Return srun's options for one task on one node. With GPUs a step gets its share of whole cores: Slurm rounds
        up, so a node's last step would wait forever. Other steps share the node. `--mem=0`: none waits for memory."""
        gpus, threads = self.shape.gpus(unit), self.allocation.threads_per_core
        if gpus:
            share = self.allocation.cpus_per_node * gpus // self.shape.gpus_per_node
            cpus = max(1, share // threads * threads)
            shares = ["--exact", f"--gpus-per-node={gpus}", f"--cpus-per-task={cpus}"]
        else:
            shares = ["--overlap", *(["--gres=none"] if self.shape.gpus_per_node else [])]
        return [
            *("srun", f"--jobid={self.allocation.job}", f"--job-name={name}", f"--nodelist={host}"),
            *("--nodes=1", "--ntasks=1", *shares, "--mem=0", "--cpu-bind=none", "--mpi=none"),
            *("--kill-on-bad-exit=0", "--no-kill=off", "--wait=0", "--unbuffered", "--input=none"),
            *self.images.options(unit),
        ]


GUARD = """
# Ends with its attempt. Nobody supervises the run once Slurm has taken the batch script's node out of the job.
while sleep "$1"; do
  job=" $(scontrol --oneliner show job "$2")" || continue
  case $job in *" Restarts=$4 "*) ;; *" Restarts="*) exit ;; *) continue ;; esac
  case $job in *" JobState=RUNNING "*) ;; *) continue ;; esac
  nodes=${job##* NodeList=}
  nodes=$(scontrol show hostnames "${nodes%% *}") || continue
  grep -qxF "$3" <<<"$nodes" || scontrol requeue "$2"
done
"""
GUARD_POLL_S = 10
GUARD_LOOK_S = 30
"""Seconds between attempts to start the guard."""


class Guard:
    """A step on another node that requeues the job when the batch script's node is lost: with --no-kill, Slurm takes a
    dead node out of the job and leaves the job running, even without its batch script."""

    def __init__(self, allocation: Allocation, log: Path) -> None:
        self._allocation, self._log = allocation, log
        self._client: Srun | None = None
        self._starts = 0
        self._next_look = 0.0

    @property
    def running(self) -> bool:
        return self._client is not None and self._client.poll() is None

    def keep(self) -> None:
        """Start the guard, or restart it elsewhere when its node died. Call this regularly."""
        if self.running or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + GUARD_LOOK_S
        others = [node for node in self._allocation.up() if node != self._allocation.batch_host]
        if not others:
            return  # Slurm itself requeues a job whose only node dies
        self._starts += 1
        job, batch_host = self._allocation.job, self._allocation.batch_host
        command = [
            *(
                "srun",
                f"--jobid={job}",
                f"--job-name=guard.{self._allocation.restart}.{self._starts}",
                f"--nodelist={others[-1]}",
            ),
            *("--nodes=1", "--ntasks=1", "--overlap", "--mem=0", "--mpi=none", "--input=none", "--output=none"),
            *("bash", "-c", GUARD, "guard", str(GUARD_POLL_S), job, batch_host, str(self._allocation.restart)),
        ]
        environment = self._allocation.step_environment(os.environ)
        self._client = Srun(command, self._log, environment, own_session=True)

    def stop(self) -> None:
        """Stop the guard's srun process; the step itself ends with the job."""
        if self._client is not None:
            self._client.kill()
