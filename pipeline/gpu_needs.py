"""How many GPUs a run takes: a pure function of its recipe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.config.recipe import Recipe
from pipeline.errors import RecipeError


@dataclass(frozen=True, kw_only=True)
class GpuNeeds:
    """How many GPUs a run takes, and whose they are."""

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
        rollout, teacher = recipe.rollout, recipe.started_teacher
        return GpuNeeds(
            learner=recipe.learner.num_processes,
            engines=rollout.started_engines,
            engine=gpus_of_server(rollout.tensor_parallel, rollout.extra_args),
            teacher=gpus_of_server(teacher.tensor_parallel, teacher.extra_args) if teacher else 0,
            shared=recipe.weights.channel == "ipc",
        )

    beside: int = field(init=False)
    """Of learner and engines together."""
    total: int = field(init=False)

    def __post_init__(self) -> None:
        both = self.learner, self.engines * self.engine
        object.__setattr__(self, "beside", max(both) if self.shared else sum(both))
        object.__setattr__(self, "total", self.beside + self.teacher)

    def __str__(self) -> str:
        engines = f"{self.engines} engine{'s' if self.engines > 1 else ''} × {self.engine}"
        parts = [
            f"a learner × {self.learner}",
            *([engines] if self.engines else []),
            *([f"a teacher × {self.teacher}"] if self.teacher else []),
        ]
        shared = " (weights.channel ipc: learner and engines share theirs)" if self.shared else ""
        return f"{', '.join(parts)} need {self.total} GPUs{shared}"


DATA_PARALLEL = ("--dp", "--dp-size", "--data-parallel-size")
PIPELINE_PARALLEL = ("--pp", "--pp-size", "--pipeline-parallel-size")
"""Names of the arguments by which a server takes several times its tensor parallel GPUs."""
OWN_PLACES = ("--base-gpu-id", "--gpu-id-step")
"""Names of those that say on which GPUs a server runs. They are the same for all engines of a recipe."""


def gpus_of_server(tensor_parallel: int, extra_args: Sequence[str]) -> int:
    """Of all its replicas and pipeline stages."""
    within = "--enable-dp-attention" in extra_args  # then data parallel ranks are the tensor parallel ones
    multipliers = (PIPELINE_PARALLEL,) if within else (PIPELINE_PARALLEL, DATA_PARALLEL)
    copies = [next((found for name in names if (found := option(extra_args, name))), "1") for names in multipliers]
    return tensor_parallel * math.prod(int(copy) if copy.isdecimal() else 1 for copy in copies)


def option(extra_args: Sequence[str], name: str) -> str | None:
    """The value of `--name value` or `--name=value`; the last one wins, as with argparse. RecipeError without one."""
    found: str | None = None
    for place, argument in enumerate(extra_args):
        if argument.startswith(f"{name}="):
            found = argument.partition("=")[2]
        elif argument == name:
            if place + 1 == len(extra_args):
                raise RecipeError(f"extra_args ends with {name}, which needs a value; add it")
            found = extra_args[place + 1]
    return found
