"""Roles as job steps: each is one `srun` on one node of the allocation.

A step is named after its unit, attempt and start (`learner-1.0.2`), which is how it is found again for a signal: srun
itself would answer SIGTERM by killing the step. Nothing is ever found by the name of a program.

A job keeps its number when it is requeued, and its steps are numbered from 0 again. What was cut off must not end its
successor's steps, so the attempt is part of the name, and srun never ends a step by number: it is killed with SIGKILL,
which it cannot answer, and it does not look at how its task ended.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from launch.run.starter import Unit, unit_environment
from launch.schedulers.slurm.allocation import ASK_PAUSE_S, Allocation, SlurmError
from launch.schedulers.slurm.placement import Shape, moved, place
from pipeline.child_process import ChildProcess
from pipeline.errors import STOPPED_EXIT_CODE

NODE_DIED = 128 + signal.SIGKILL
"""Exit status of a step whose node died, as if the node had killed it; srun has none of its own for that."""
KILL_S = 15
"""How long a killed step may take to disappear. One on a node that is gone stays listed until Slurm notices."""
AT_ONCE_S = 600
"""Within which all roles end that were asked to at the same moment: some save first."""
UNMADE_S = 300.0
"""After which it is said that Slurm has not made a step. srun waits for ever, and says so in the role's log alone."""
_POLL_S = 0.5


@dataclass(frozen=True)
class Images:
    """Container images of the roles, by pyxis."""

    learner: str | None = None
    rollout: str | None = None
    mounts: str | None = None

    def options(self, unit: Unit) -> list[str]:
        """Of srun."""
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
    _look_at: float = field(default_factory=lambda: time.monotonic() + UNMADE_S)
    """When it is looked whether Slurm has made it."""

    @property
    def log(self) -> Path | None:
        return self.client.log

    def poll(self) -> int | None:
        """Exit status of the role, None while it runs."""
        if self.status is None and (status := self.client.poll()) is not None:
            # srun ends with 0 when the node of its step dies.
            self.status = NODE_DIED if status == 0 and not self.allocation.is_up(self.host) else status
            self.on_end(self)
        elif self.status is None and time.monotonic() >= self._ask_at:
            self._ask_to_end()
        elif self.status is None and time.monotonic() >= self._look_at:
            self._look_at = math.inf
            self._say_if_unmade()
        return self.status

    def _say_if_unmade(self) -> None:
        with suppress(SlurmError):
            if self.allocation.step(self.name) is None:
                print(
                    f"warning: Slurm has not started {self.name} on {self.host} in {UNMADE_S:.0f} s; it waits for GPUs "
                    f"or CPUs of that node that other steps hold (`squeue --steps -j {self.allocation.job}`, "
                    f"`scontrol show node {self.host}`); what srun says is in {self.log}",
                    flush=True,
                )

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
        """Whether roles ended in order that this program did not ask, on all nodes at once: `scancel --signal=TERM
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
        before, self.places = self.places, self._places_for(unit)
        for one in (one for one in before if before[one] != self.places[one]):
            print(f"{one.name} moves from {before[one]} to {self.places[one]}", flush=True)
        host = self.places[unit]
        self.starts[unit] += 1
        name = f"{unit.name}.{self.allocation.restart}.{self.starts[unit]}"
        srun = [*self.srun_options(unit, host, name), *self.command(unit, host)]
        environment = self.allocation.step_environment(unit_environment(unit, self.environment))
        client = Srun(srun, log, environment, own_session=True)
        return Step(self.allocation, name, host, client, self._ended)

    def _places_for(self, unit: Unit) -> dict[Unit, str]:
        up, draining = self.allocation.up(), self.allocation.draining
        if self.places.get(unit) not in up:
            return place(self.shape, up, self.places)
        if self.places[unit] in draining:
            return moved(self.shape, unit, [node for node in up if node not in draining], self.places)
        return self.places

    def srun_options(self, unit: Unit, host: str, name: str) -> list[str]:
        """One task on one node. With GPUs a step has its own, and its share of the CPUs in whole cores: Slurm rounds
        up, and a node's last step would wait for ever. Other steps share what there is. `--mem=0`: no step waits for
        the memory of another."""
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
        """With the run; the step itself ends with the job."""
        if self._client is not None:
            self._client.kill()
