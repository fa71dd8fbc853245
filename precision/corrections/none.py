"""No correction: the objective as it is."""

from __future__ import annotations

from typing import ClassVar, Literal

from precision.corrections.base import Correction
from precision.measures import Measure
from precision.objectives.base import Objective, ScoredStep
from precision.torch_on_use import Tensor, torch


class NoCorrection(Correction):
    """Costs nothing: `applied_to` adds no pass over the step."""

    name: Literal["none"] = "none"

    weighs_by_old_ratio: ClassVar[bool] = False
    reads_rollout_logprobs: ClassVar[bool] = False
    reads_step_logprobs: ClassVar[bool] = False
    measures: ClassVar[tuple[Measure, ...]] = ()

    def factor(self, step: ScoredStep) -> tuple[Tensor, dict[str, float]]:
        """1 for every token."""
        return torch.ones_like(step.advantages, dtype=torch.float64), {}

    def applied_to(self, objective: Objective) -> Objective:
        """The objective itself."""
        return objective
