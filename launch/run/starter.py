"""Start a run's roles for its supervisor, as processes of this machine with separate GPUs.

    disk, delta, broadcast    learner's ranks | engine 0 | engine 1 | … | teacher
    ipc                       learner's ranks                   | teacher
                              engine 0 | engine 1 | …           |

A role sees only its GPUs. With ipc an engine also sees the GPUs of the learner and of the other engines, after its own,
since it opens the learner's memory. On several hosts the scheduler decides which GPUs a role sees.
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
"""Roles that show metrics on one machine, in the order of their ports after the supervisor's."""


class NoRoomError(RetryableError):
    """There is no host left for a role."""


@dataclass(frozen=True)
class Unit:
    """A role's process on one host, started and restarted separately."""

    role: StartedRole
    index: int | None = None
    node: int = 0
    """Number of this host among the hosts of a learner or an engine."""

    @property
    def name(self) -> str:
        """Name such as learner, learner-1, engine-0, engine-0-node-1."""
        if self.role == "learner":
            return f"learner-{self.node}" if self.node else "learner"
        name = self.role if self.index is None else f"{self.role}-{self.index}"
        return f"{name}-node-{self.node}" if self.node else name


class Started(Protocol):
    @property
    def log(self) -> Path | None: ...

    def poll(self) -> int | None:
        """Return the exit status, or minus the signal that ended the process; None while it runs."""

    def terminate(self) -> None:
        """Send SIGTERM, and return at once."""

    def kill(self) -> None:
        """Kill the process and its descendants, and return once they have ended."""


def units_of(recipe: Recipe, learner_nodes: int = 1, engine_nodes: int = 1) -> list[Unit]:
    engines = range(recipe.rollout.started_engines)
    return [
        *(Unit("engine", index, node) for index in engines for node in range(engine_nodes)),
        *([Unit("router")] if recipe.rollout.starts_router else []),
        *(Unit("learner", node=node) for node in range(learner_nodes)),
        Unit("collector"),
    ]


def role_command(run: RunDirectory, unit: Unit, *options: str) -> list[str]:
    place: list[str] = []
    if unit.role == "learner":
        place = [str(unit.node)]
    elif unit.role == "engine":
        place = [str(unit.index)]
    # -P: a `pipeline.py` in the user's folder must not hide ours.
    return [sys.executable, "-P", "-m", "launch.cli", "role", unit.role, str(run.path.absolute()), *place, *options]


def metrics_options(unit: Unit, supervisor: int | None) -> list[str]:
    """Return the options with which a unit shows metrics; none if the supervisor's port, `supervisor`, is None."""
    if supervisor is None:
        return []
    if unit.role == "engine":
        return ["--metrics"]
    return ["--metrics-port", str(supervisor + 1 + METRICS_PORTS.index(unit.role))]


def metrics_ports(recipe: Recipe, supervisor: int | None) -> dict[str, int]:
    """Return role → metrics port on this machine; empty without the supervisor's. Engines use their serving port."""
    if supervisor is None:
        return {}
    started = {unit.role for unit in units_of(recipe)}
    ports: dict[str, int] = {"supervisor": supervisor}
    ports |= {role: supervisor + 1 + place for place, role in enumerate(METRICS_PORTS) if role in started}
    return ports


class LocalStarter:
    """A starter of all units on this machine, on loopback."""

    def __init__(
        self,
        run: RunDirectory,
        recipe: Recipe,
        api_key: str,
        metrics_port: int | None = None,
        gpus: Sequence[str] = (),
    ) -> None:
        """Divide `gpus` among the roles; `metrics_port` is the supervisor's. Raises as gpu_places does."""
        self._run, self._api_key, self._metrics_port = run, api_key, metrics_port
        self._places, rollout = gpu_places(recipe, gpus), recipe.rollout
        self._urls, self._first_port, self._engines = rollout.urls, rollout.port, rollout.engines
        self._drawn: dict[Unit, int] = {}
        """Port drawn for the newest start of each unit whose port the recipe does not name."""

    def start(self, unit: Unit, log: Path) -> Started:
        """Start a unit, and append its output to `log`."""
        options = metrics_options(unit, self._metrics_port)
        if unit.role in ("engine", "router"):
            port = self._first_port
            if port is not None:
                port += self._engines if unit.index is None else unit.index
            else:  # a new port at each start: the last one may still be taken
                others = {drawn for one, drawn in self._drawn.items() if one != unit}
                port = next(port for port in free_ports(len(others) + 1) if port not in others)
                self._drawn[unit] = port
            options += ["--port", str(port)]
        environment = child_environment()
        if unit.role != "collector":  # only the collector asks the teacher
            environment = without_teacher_key(environment)
        environment |= {API_KEY_VARIABLE: self._api_key, LOG_VARIABLE: str(log)}
        environment |= self._places.environment(unit.role, unit.index)
        if not self._urls:
            environment |= interface_environment(LOOPBACK, alone=True)
        if unit.role != "collector":  # the collector hides that file from reward code
            environment.pop(API_KEY_FILE_VARIABLE, None)
        return _Child(role_command(self._run, unit, *options), log, environment, own_session=True)


class _Child(ProcessTree):
    """A unit's process. Ctrl-C reaches only the supervisor, which ends its units in order."""

    when_parent_dies = signal.SIGKILL


VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class GpuPlaces:
    """GPUs of each role, named as in CUDA_VISIBLE_DEVICES; an empty tuple leaves a role all visible GPUs."""

    learner: tuple[str, ...] = ()
    engines: tuple[tuple[str, ...], ...] = ()
    collector: tuple[str, ...] = ()
    """GPUs of the teacher that the collector starts; empty without a teacher."""

    def environment(self, role: str, index: int | None) -> dict[str, str]:
        """Return the environment variable that names a role's GPUs. `index` is an engine's."""
        own = dict(learner=self.learner, collector=self.collector).get(role, ())
        if role == "engine" and index is not None and self.engines:
            own = self.engines[index]
        return {VISIBLE_VARIABLE: ",".join(own)} if own else {}


def visible_gpus() -> tuple[str, ...]:
    """Return the GPUs that this process may use, in order: the names in CUDA_VISIBLE_DEVICES, or their numbers."""
    named = os.environ.get(VISIBLE_VARIABLE)
    count = num_gpus()  # the driver stops at the first name that it does not know
    names = map(str, range(count)) if named is None else (name.strip() for name in named.split(","))
    return tuple(names)[:count]


def gpu_places(recipe: Recipe, gpus: Sequence[str]) -> GpuPlaces:
    """Assign GPUs to each role of a run on one machine; without GPUs, all roles run on the CPU.

    Each start gives the same places. Raises MachineError for too few GPUs, RecipeError for extra_args that place
    servers.
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
