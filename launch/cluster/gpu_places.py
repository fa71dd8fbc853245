"""Which GPUs of one machine each role of a run has: pure functions of the recipe and of the GPUs that there are.

    disk, delta, broadcast    learner's ranks | engine 0 | engine 1 | … | teacher
    ipc                       learner's ranks                   | teacher
                              engine 0 | engine 1 | …           |

A role sees its own GPUs alone. With ipc an engine sees those of the learner and of the other engines behind its own,
since it opens the learner's memory. On several hosts the scheduler, or whoever starts the roles, says what each sees.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.config.recipe import Recipe
from pipeline.errors import MachineError, RecipeError
from pipeline.gpu_needs import GpuNeeds
from pipeline.server_arguments import OWN_PLACES, option
from rollout_sglang.server.start import num_gpus

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"


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
    where they are too few, RecipeError for extra_args that place a server themselves.
    """
    if not gpus:
        return GpuPlaces()
    _refuse_own_places(recipe)
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


def _refuse_own_places(recipe: Recipe) -> None:
    """Raises RecipeError for extra_args that place a server themselves."""
    teacher = recipe.started_teacher
    given = {"rollout": recipe.rollout.extra_args, "distillation": teacher.extra_args if teacher else ()}
    for section, extra_args in given.items():
        for name in OWN_PLACES:
            if (value := option(extra_args, name)) is not None:
                raise RecipeError(
                    f"{section}.extra_args has {name} {value}, but on one machine every role is given GPUs of its own; "
                    f"leave it out, and say by {VISIBLE_VARIABLE} which GPUs the run may use"
                )


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
