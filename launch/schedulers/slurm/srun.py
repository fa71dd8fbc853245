"""Run roles as job steps, each one `srun` on one node of the allocation, and ask Slurm about the job.

A step is named after its unit, attempt and start (`learner-1.0.2`), which is how it is found again for a signal: srun
itself would answer SIGTERM by killing the step. Nothing is ever found by the name of a program.

A job keeps its number when it is requeued, and its steps are numbered from 0 again. What was cut off must not end its
successor's steps, so the attempt is part of the name, and srun never ends a step by number: it is killed with SIGKILL,
which it cannot answer, and it does not look at how its task ended.

Slurm's controller may be away for minutes, for a restart or an upgrade, and the run goes on meanwhile. So questions are
answered with what was last known, and only orders that the run depends on fail.
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
"""Exit status of a step whose node died, as if the node had killed it; srun has none of its own for that."""
KILL_S = 15
"""How long a killed step may take to disappear. One on a node that is gone stays listed until Slurm notices."""
AT_ONCE_S = 600
"""Within which all roles end that were asked to at the same moment: some save first."""
_POLL_S = 0.5
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
        """Read what Slurm gives to a batch script. Raises FatalError outside of one."""
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
        """Name this attempt: `slurm-1234-0`."""
        return f"slurm-{self.job}-{self.restart}"

    def up(self) -> list[str]:
        """List the nodes of the job on which something can be started: the batch script's first, those that are
        draining last. Raises SupersededError when Slurm has started the job again: these nodes are the successor's."""
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
        # One that sinfo does not list is of a partition that it hides from this user, and is the job's all the same.
        state = {node: said.get(node, "idle") for node in nodes.split()}
        up = [node for node, word in state.items() if not any(sign in word for sign in _GONE)]
        self.draining = frozenset(node for node in up if "drain" in state[node])
        self._last_known = sorted(up, key=lambda node: (node in self.draining, node != self.batch_host))
        return self._last_known

    def _current(self) -> dict[str, str]:
        """Ask Slurm about this job. Raises SupersededError, SlurmError."""
        words = run_slurm("scontrol", "--oneliner", "show", "job", self.job).split()
        fields = dict(word.split("=", 1) for word in reversed(words) if "=" in word)
        if int(fields["Restarts"]) != self.restart:
            raise SupersededError(
                f"job {self.job} was started again (restart {fields['Restarts']}) while this node was cut off; attempt "
                f"{self.restart} ends"
            )
        return fields

    def address(self, node: str) -> str:
        """Find where the other nodes reach a node: what its name leads to, or else its NodeAddr.

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

    def is_preempted(self) -> bool:
        """Ask whether Slurm has told this job to make room, and ends it after its grace time. Raises SupersededError,
        SlurmError."""
        return self._current().get("PreemptTime", "None") != "None"  # no such field where nothing is ever preempted

    def step(self, name: str) -> str | None:
        """Find JOBID.STEP of the step of that name; None before srun has made it, and when it is gone."""
        listed = run_slurm("squeue", "-a", "-h", "--steps", "-j", self.job, "-o", "%i %j")
        return next((words[0] for words in map(str.split, listed.splitlines()) if words[1:] == [name]), None)

    def signal(self, step: str, signal: str) -> None:
        """Send a signal to all processes of one step. The controller is asked: straight to a node, scancel of Slurm
        22.05 delivers SIGTERM and then reports an error."""
        run_slurm("scancel", "--ctld", f"--signal={signal}", step)

    def requeue(self) -> None:
        """End this job and queue it again; Slurm ends this process. Raises SupersededError when it already was."""
        self._current()
        run_slurm("scontrol", "requeue", self.job)

    def submit_next(self, script: Path) -> str:
        """Submit the same script as a job that begins when this one has ended; returns its id."""
        return run_slurm("sbatch", "--parsable", f"--dependency=afterany:{self.job}", str(script)).strip()

    def step_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Leave out what Slurm told the batch script: srun would read the job's GPUs, tasks and memory as wishes for
        each step."""
        kept = {
            name: value
            for name, value in environment.items()
            if not name.startswith(("SLURM_", "SLURMD_", "SBATCH_", "SRUN_")) or name in _OF_THE_USER
        }
        return {**kept, "SLURM_JOB_ID": self.job, "SLURM_EXPORT_ENV": "ALL"}


def run_slurm(*command: str) -> str:
    """Run a command of Slurm's to its end; returns its output. Raises SlurmError."""
    # A job that is submitted from within a job must not inherit the first one's wishes.
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
    """Container images of the roles, by pyxis."""

    learner: str | None = None
    rollout: str | None = None
    mounts: str | None = None

    def options(self, unit: Unit) -> list[str]:
        """Return options of srun."""
        image = self.rollout if unit.role in ("engine", "router") else self.learner
        if image is None:
            return []
        mounts = [f"--container-mounts={self.mounts}"] if self.mounts else []
        return [f"--container-image={image}", *mounts, f"--container-workdir={Path.cwd()}"]


class Srun(ChildProcess):
    """The client of a step. When this program dies, Slurm ends the steps together with the batch script."""

    when_parent_dies = signal.SIGKILL


@dataclass
class Step:
    """A role that runs as a job step; the client srun is a child of this process."""

    allocation: Allocation
    name: str
    host: str
    client: Srun
    on_end: Callable[[Step], None]
    asked: bool = False
    """To end, by us."""
    status: int | None = None
    _ask_at: float = math.inf
    """When it is asked again to end, where Slurm's controller did not answer."""

    @property
    def log(self) -> Path | None:
        return self.client.log

    def poll(self) -> int | None:
        """Return the exit status of the role, None while it runs."""
        if self.status is None and (status := self.client.poll()) is not None:
            # srun ends with 0 when the node of its step dies.
            self.status = NODE_DIED if status == 0 and self.host not in self.allocation.up() else status
            self.on_end(self)
        elif self.status is None and time.monotonic() >= self._ask_at:
            self._ask_to_end()
        return self.status

    def terminate(self) -> None:
        """Ask the role to end in order; returns at once. A step that Slurm has not made yet is given up."""
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
        except SlurmError as error:  # its controller may be started again just now; `poll` asks once more
            print(f"warning: {error}; {self.name} is asked to end again", file=sys.stderr, flush=True)
            self._ask_at = time.monotonic() + ASK_PAUSE_S

    def kill(self) -> None:
        """End the step; returns once it is gone, or after KILL_S."""
        self.asked = True
        give_up = time.monotonic() + KILL_S
        with suppress(SlurmError):
            while (step := self.allocation.step(self.name)) is not None and time.monotonic() < give_up:
                self.allocation.signal(step, "KILL")
                time.sleep(_POLL_S)
        self.client.kill()


@dataclass
class SrunStarter:
    """Starts units on nodes that are up. A unit stays on its node as long as that is up. It leaves one that is draining
    when it is started again, if another node has room: a fault of the node may be what it died of."""

    allocation: Allocation
    shape: Shape
    command: Callable[[Unit, str], list[str]]
    """The program of a unit on a host."""
    environment: Mapping[str, str]
    images: Images = Images()
    places: dict[Unit, str] = field(default_factory=dict)
    starts: Counter[Unit] = field(default_factory=Counter)
    _orderly: list[tuple[float, str]] = field(default_factory=list)
    """When and where roles ended in order that were not asked to."""

    def asked_from_outside(self) -> bool:
        """Tell whether roles ended in order that this program did not ask, on all nodes at once: `scancel --signal=TERM
        JOB`, and Slurm before it preempts a job, reach the steps and not the batch script. On one node of several that
        was a node that shut down."""
        now = time.monotonic()
        self._orderly = [(when, host) for when, host in self._orderly if now - when < AT_ONCE_S]
        return len({host for _, host in self._orderly}) >= min(2, len(set(self.places.values())) or 1)

    def _ended(self, step: Step) -> None:
        if step.status == STOPPED_EXIT_CODE and not step.asked:
            self._orderly.append((time.monotonic(), step.host))

    def start(self, unit: Unit, log: Path) -> Step:
        """Start a unit, on another node if its own is gone. Raises NoRoomError when the nodes are too few."""
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
        """Ask for one task on one node. With GPUs a step has its own, and its share of the CPUs in whole cores: Slurm
        rounds up, and a node's last step would wait for ever. Other steps share what there is. `--mem=0`: no step waits
        for the memory of another."""
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
"""Between two attempts to start the guard."""


class Guard:
    """A step on another node that requeues the job when the node of the batch script is gone.

    With --no-kill Slurm takes a dead node out of the job and leaves the job running, even without its batch script.
    """

    def __init__(self, allocation: Allocation, log: Path) -> None:
        self._allocation, self._log = allocation, log
        self._client: Srun | None = None
        self._starts = 0
        self._next_look = 0.0

    @property
    def running(self) -> bool:
        return self._client is not None and self._client.poll() is None

    def keep(self) -> None:
        """Start it, or start it again elsewhere when its node died. Call it now and then."""
        if self.running or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + GUARD_LOOK_S
        others = [node for node in self._allocation.up() if node != self._allocation.batch_host]
        if not others:
            return  # Slurm requeues a job by itself when its only node dies
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
        """End it with the run; the step itself ends with the job."""
        if self._client is not None:
            self._client.kill()
