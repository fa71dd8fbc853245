"""Which GPUs of one machine each role of a run has: pure functions of the recipe and of the GPUs that there are.

    disk, delta, broadcast    learner's ranks | engine 0 | engine 1 | … | teacher
    ipc                       learner's ranks                   | teacher
                              engine 0 | engine 1 | …           |

A role sees its own GPUs alone. With ipc an engine sees those of the learner and of the other engines behind its own,
since it opens the learner's memory. On several hosts the scheduler, or whoever starts the roles, says what each sees.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from launch.build.engine_arguments import DATA_PARALLEL, OWN_PLACES, PIPELINE_PARALLEL
from pipeline.config.recipe import Recipe
from pipeline.errors import MachineError, RecipeError
from rollout_sglang.server.capacity import option
from rollout_sglang.server.start import num_gpus

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class GpuNeeds:
    """How many GPUs a run takes on one machine, and whose they are."""

    learner: int
    engines: int
    """Engines that are started with the run."""
    engine: int
    """Of one of them."""
    teacher: int
    shared: bool
    """Whether learner and engines have the same ones."""

    @staticmethod
    def of(recipe: Recipe) -> GpuNeeds:
        """Raises RecipeError for extra_args that place a server themselves."""
        rollout, teacher = recipe.rollout, recipe.started_teacher
        return GpuNeeds(
            learner=recipe.learner.num_processes,
            engines=0 if rollout.urls else rollout.engines,
            engine=_of_server(rollout.tensor_parallel, rollout.extra_args, "rollout"),
            teacher=_of_server(teacher.tensor_parallel, teacher.extra_args, "distillation") if teacher else 0,
            shared=recipe.weights.channel == "ipc",
        )

    @property
    def beside(self) -> int:
        """Of learner and engines together."""
        both = self.learner, self.engines * self.engine
        return max(both) if self.shared else sum(both)

    @property
    def total(self) -> int:
        return self.beside + self.teacher

    def __str__(self) -> str:
        engines = f"{self.engines} engine{'s' if self.engines > 1 else ''} × {self.engine}"
        parts = [
            f"a learner × {self.learner}",
            *([engines] if self.engines else []),
            *([f"a teacher × {self.teacher}"] if self.teacher else []),
        ]
        shared = " (weights.channel ipc: learner and engines share theirs)" if self.shared else ""
        return f"{', '.join(parts)} need {self.total} GPUs{shared}"


@dataclass(frozen=True, kw_only=True)
class GpuPlaces:
    """The GPUs of each role, as CUDA_VISIBLE_DEVICES names them; none where a role sees all that there are."""

    learner: tuple[str, ...] = ()
    engines: tuple[tuple[str, ...], ...] = ()
    collector: tuple[str, ...] = ()
    """For the teacher that it starts; without one it sees what this process does."""

    def environment(self, role: str, index: int | None) -> dict[str, str]:
        """What a role is told of its GPUs. `index`: of an engine."""
        own = dict(learner=self.learner, collector=self.collector).get(role, ())
        if role == "engine" and index is not None and self.engines:
            own = self.engines[index]
        return {VISIBLE_VARIABLE: ",".join(own)} if own else {}


def visible_gpus() -> tuple[str, ...]:
    """Names of the GPUs that this process may use, in order: its CUDA_VISIBLE_DEVICES, or their numbers."""
    named = os.environ.get(VISIBLE_VARIABLE)
    count = num_gpus()  # the driver stops at the first name that it does not know
    names = map(str, range(count)) if named is None else (name.strip() for name in named.split(","))
    return tuple(names)[:count]


def gpu_places(recipe: Recipe, gpus: Sequence[str]) -> GpuPlaces:
    """Where each role of a run goes on a machine with these GPUs; without any, all run on its CPU.

    The same recipe and GPUs give the same places, so that a role is started again where it was. Raises MachineError
    where they are too few, RecipeError as GpuNeeds.of does.
    """
    if not gpus:
        return GpuPlaces()
    needs = GpuNeeds.of(recipe)
    if needs.total > len(gpus):
        raise MachineError(_too_few(recipe, needs, gpus))
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


def _of_server(tensor_parallel: int, extra_args: Sequence[str], section: str) -> int:
    for name in OWN_PLACES:
        if (value := option(extra_args, name)) is not None:
            raise RecipeError(
                f"{section}.extra_args has {name} {value}, but on one machine every role is given GPUs of its own; "
                f"leave it out, and say by {VISIBLE_VARIABLE} which GPUs the run may use"
            )
    within = "--enable-dp-attention" in extra_args  # then data parallel ranks are the tensor parallel ones
    multipliers = (PIPELINE_PARALLEL,) if within else (PIPELINE_PARALLEL, DATA_PARALLEL)
    copies = [next((found for name in names if (found := option(extra_args, name))), "1") for names in multipliers]
    return tensor_parallel * math.prod(int(copy) if copy.isdecimal() else 1 for copy in copies)


def _too_few(recipe: Recipe, needs: GpuNeeds, gpus: Sequence[str]) -> str:
    sharing = recipe.model_copy(update=dict(weights=recipe.weights.model_copy(update=dict(channel="ipc"))))
    fits_shared = needs.engines and GpuNeeds.of(sharing).total <= len(gpus)
    named = os.environ.get(VISIBLE_VARIABLE)
    return (
        f"{needs}, and this machine has {len(gpus)}{f' ({VISIBLE_VARIABLE} is {named})' if named else ''}; lower "
        f"a size of the learner's layout{' or rollout.engines' if needs.engines else ''}, "
        f"{'set weights.channel=ipc where learner and engine both fit on a GPU, ' if fits_shared else ''}"
        f"or start the roles on several hosts (docs/cluster.md); {VISIBLE_VARIABLE}= runs a toy model on the CPU"
    )
