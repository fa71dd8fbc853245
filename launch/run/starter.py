"""Start the roles of a run for its supervisor: as processes of this machine, each with GPUs of its own.

    disk, delta, broadcast    learner's ranks | engine 0 | engine 1 | … | teacher
    ipc                       learner's ranks                   | teacher
                              engine 0 | engine 1 | …           |

A role sees its own GPUs alone. With ipc an engine sees those of the learner and of the other engines behind its own,
since it opens the learner's memory. On several hosts the scheduler, or whatever starts the roles, says what each sees.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from launch.build.api_key import API_KEY_FILE_VARIABLE, API_KEY_VARIABLE, without_teacher_key
from launch.run.addresses import LOOPBACK, interface_environment
from launch.run.processes import ProcessTree, child_environment
from launch.run.waiting import LOG_VARIABLE
from pipeline.config.recipe import Recipe
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import MachineError, RecipeError, RetryableError
from pipeline.gpu_needs import OWN_PLACES, GpuNeeds, option
from rollout_sglang.server.start import free_ports, num_gpus

StartedRole = Literal["learner", "collector", "engine", "router"]


METRICS_PORTS: tuple[StartedRole, ...] = ("learner", "collector", "router")
"""On one machine: roles that show their metrics at the ports after the supervisor's, in this order."""


class NoRoomError(RetryableError):
    """There is no host left for a role."""


@dataclass(frozen=True)
class Unit:
    """One process of a role: what is started, and started again, by itself."""

    role: StartedRole
    index: int | None = None
    """Of an engine."""
    node: int = 0
    """Which of the hosts that a learner or an engine spans."""

    @property
    def name(self) -> str:
        """learner, learner-1, engine-0, engine-0-node-1 …"""
        if self.role == "learner":
            return f"learner-{self.node}" if self.node else "learner"
        name = self.role if self.index is None else f"{self.role}-{self.index}"
        return f"{name}-node-{self.node}" if self.node else name


class Started(Protocol):
    """A process that was started."""

    @property
    def log(self) -> Path | None: ...

    def poll(self) -> int | None:
        """Exit status, or minus the signal that ended it; None while it runs."""

    def terminate(self) -> None:
        """Ask it to end (SIGTERM); returns at once."""

    def kill(self) -> None:
        """End it and all below it; returns when they have ended."""


def units_of(recipe: Recipe, learner_nodes: int = 1, engine_nodes: int = 1) -> list[Unit]:
    """List what is started for a run."""
    engines = range(recipe.rollout.started_engines)
    return [
        *(Unit("engine", index, node) for index in engines for node in range(engine_nodes)),
        *([Unit("router")] if recipe.rollout.starts_router else []),
        *(Unit("learner", node=node) for node in range(learner_nodes)),
        Unit("collector"),
    ]


def role_command(run: RunDirectory, unit: Unit, *options: str) -> list[str]:
    """Make the argv of a unit, which ends with `options`."""
    place: list[str] = []
    if unit.role == "learner":
        place = [str(unit.node)]
    elif unit.role == "engine":
        place = [str(unit.index)]
    # -P: a `pipeline.py` in the user's folder must not hide ours.
    return [sys.executable, "-P", "-m", "launch.cli", "role", unit.role, str(run.path.absolute()), *place, *options]


def metrics_options(unit: Unit, supervisor: int | None) -> list[str]:
    """Make the options by which a unit shows its metrics, where the supervisor has a port for its own."""
    if supervisor is None:
        return []
    if unit.role == "engine":
        return ["--metrics"]
    return ["--metrics-port", str(supervisor + 1 + METRICS_PORTS.index(unit.role))]


def metrics_ports(recipe: Recipe, supervisor: int | None) -> dict[str, int]:
    """Map each role to the port at which it shows its metrics on this machine; none where the supervisor has no port
    for its own. Engines show theirs where they serve."""
    if supervisor is None:
        return {}
    started = {unit.role for unit in units_of(recipe)}
    ports: dict[str, int] = {"supervisor": supervisor}
    ports |= {role: supervisor + 1 + place for place, role in enumerate(METRICS_PORTS) if role in started}
    return ports


class LocalStarter:
    """Starts all units on this machine, on loopback."""

    def __init__(
        self,
        run: RunDirectory,
        recipe: Recipe,
        api_key: str,
        metrics_port: int | None = None,
        gpus: Sequence[str] = (),
    ) -> None:
        """`metrics_port` is the supervisor's; `gpus` are given out to the roles. Raises as gpu_places does."""
        self._run, self._api_key, self._metrics_port = run, api_key, metrics_port
        self._places, rollout = gpu_places(recipe, gpus), recipe.rollout
        self._urls, self._first_port, self._engines = rollout.urls, rollout.port, rollout.engines
        self._drawn: dict[Unit, int] = {}
        """Ports that the recipe does not name, as they were drawn for the newest start of each unit."""

    def start(self, unit: Unit, log: Path) -> Started:
        """Start a unit, whose output is appended to `log`."""
        options = metrics_options(unit, self._metrics_port)
        if unit.role in ("engine", "router"):
            port = self._first_port
            if port is not None:
                port += self._engines if unit.index is None else unit.index
            else:  # another one at each start: what took the last one may still be there
                others = {drawn for one, drawn in self._drawn.items() if one != unit}
                port = next(port for port in free_ports(len(others) + 1) if port not in others)
                self._drawn[unit] = port
            options += ["--port", str(port)]
        environment = child_environment()
        if unit.role != "collector":  # which alone asks the teacher
            environment = without_teacher_key(environment)
        environment |= {API_KEY_VARIABLE: self._api_key, LOG_VARIABLE: str(log)}
        environment |= self._places.environment(unit.role, unit.index)
        if not self._urls:
            environment |= interface_environment(LOOPBACK, alone=True)
        if unit.role != "collector":  # which hides that file from code of rewards
            environment.pop(API_KEY_FILE_VARIABLE, None)
        return _Child(role_command(self._run, unit, *options), log, environment, own_session=True)


class _Child(ProcessTree):
    """Ctrl-C reaches the supervisor only, which then ends its units in order."""

    when_parent_dies = signal.SIGKILL


VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class GpuPlaces:
    """The GPUs of each role, as CUDA_VISIBLE_DEVICES names them; none where a role sees all that there are."""

    learner: tuple[str, ...] = ()
    engines: tuple[tuple[str, ...], ...] = ()
    collector: tuple[str, ...] = ()
    """For the teacher that it starts; without one it sees what this process does."""

    def environment(self, role: str, index: int | None) -> dict[str, str]:
        """Name a role's GPUs in its environment. `index`: of an engine."""
        own = dict(learner=self.learner, collector=self.collector).get(role, ())
        if role == "engine" and index is not None and self.engines:
            own = self.engines[index]
        return {VISIBLE_VARIABLE: ",".join(own)} if own else {}


def visible_gpus() -> tuple[str, ...]:
    """Name the GPUs that this process may use, in order: its CUDA_VISIBLE_DEVICES, or their numbers."""
    named = os.environ.get(VISIBLE_VARIABLE)
    count = num_gpus()  # the driver stops at the first name that it does not know
    names = map(str, range(count)) if named is None else (name.strip() for name in named.split(","))
    return tuple(names)[:count]


def gpu_places(recipe: Recipe, gpus: Sequence[str]) -> GpuPlaces:
    """Place each role of a run on a machine with these GPUs; without any, all run on its CPU.

    The same recipe and GPUs give the same places, so that a role is started again where it was. Raises MachineError
    where they are too few, RecipeError for extra_args that place a server themselves.
    """
    if not gpus:
        return GpuPlaces()
    teacher_section = recipe.started_teacher
    given = {
        "rollout": recipe.rollout.extra_args,
        "distillation": teacher_section.extra_args if teacher_section else (),
    }
    for section, extra_args in given.items():
        for name in OWN_PLACES:
            if (value := option(extra_args, name)) is not None:
                raise RecipeError(
                    f"{section}.extra_args has {name} {value}, but on one machine every role is given GPUs of its own; "
                    f"leave it out, and say by {VISIBLE_VARIABLE} which GPUs the run may use"
                )
    needs = GpuNeeds.of(recipe)
    if needs.total > len(gpus):
        sharing = recipe.model_copy(update=dict(weights=recipe.weights.model_copy(update=dict(channel="ipc"))))
        fits_shared = needs.engines and GpuNeeds.of(sharing).total <= len(gpus)
        named = os.environ.get(VISIBLE_VARIABLE)
        raise MachineError(
            f"{needs}, and this machine has {len(gpus)}{f' ({VISIBLE_VARIABLE} is {named})' if named else ''}; lower "
            f"a size of the learner's layout{' or rollout.engines' if needs.engines else ''}, "
            f"{'set weights.channel=ipc where learner and engine both fit on a GPU, ' if fits_shared else ''}"
            f"or start the roles on several hosts (docs/cluster.md); {VISIBLE_VARIABLE}= runs a toy model on the CPU"
        )
    beside, teacher = tuple(gpus[: needs.beside]), tuple(gpus[needs.beside : needs.total])
    first = 0 if needs.shared else needs.learner
    starts = [first + index * needs.engine for index in range(needs.engines)]
    return GpuPlaces(
        learner=beside[: needs.learner],
        engines=tuple(
            beside[start:] + beside[:start] if needs.shared else beside[start : start + needs.engine]
            for start in starts
        ),
        collector=teacher,
    )
