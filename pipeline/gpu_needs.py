"""Count the GPUs of a run, from its recipe alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.config.recipe import Recipe
from pipeline.errors import RecipeError


@dataclass(frozen=True, kw_only=True)
class GpuNeeds:
    """The GPUs of a run, by role."""

    learner: int
    engines: int
    """The number of engines started with the run."""
    engine: int
    """Per engine."""
    teacher: int
    shared: bool

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
"""Arguments by which a server takes several times its tensor parallel GPUs."""
OWN_PLACES = ("--base-gpu-id", "--gpu-id-step")
"""Arguments that choose a server's GPUs. All engines of a recipe have the same arguments."""


def gpus_of_server(tensor_parallel: int, extra_args: Sequence[str]) -> int:
    """Count the GPUs of a server with all its replicas and pipeline stages."""
    within = "--enable-dp-attention" in extra_args  # then data parallel ranks are the tensor parallel ones
    multipliers = (PIPELINE_PARALLEL,) if within else (PIPELINE_PARALLEL, DATA_PARALLEL)
    copies = [next((found for name in names if (found := option(extra_args, name))), "1") for names in multipliers]
    return tensor_parallel * math.prod(int(copy) if copy.isdecimal() else 1 for copy in copies)


def option(extra_args: Sequence[str], name: str) -> str | None:
    """Return the last value of `--name value` or `--name=value`, as argparse does. Raises RecipeError for none."""
    found: str | None = None
    for place, argument in enumerate(extra_args):
        if argument.startswith(f"{name}="):
            found = argument.partition("=")[2]
        elif argument == name:
            if place + 1 == len(extra_args):
                raise RecipeError(f"extra_args ends with {name}, which needs a value; add it")
            found = extra_args[place + 1]
    return found
