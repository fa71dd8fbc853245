"""How many GPUs a run takes: a pure function of its recipe."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.recipe import Recipe
from pipeline.server_arguments import gpus_of_server


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
