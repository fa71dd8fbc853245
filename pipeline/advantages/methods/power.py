"""power: hard prompts weigh more (a probe of FADE's paper, arXiv 2607.01490; FADE at one moment)."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat

from pipeline.advantages.base import Advantage, Curve, Groups, Rewards
from pipeline.advantages.groups import Grouped
from pipeline.advantages.methods.asym_grpo import asymmetric


class Power(Advantage):
    """(1 - r̄)^(alpha - 1) × asym_grpo, of rewards clipped to [0, 1]: the weight falls with the group's solve rate."""

    asks_what_is_solved: ClassVar[bool] = True
    name: Literal["power"] = "power"
    alpha: float = Field(2.0, ge=1.0, description="Successes weigh p q^alpha: larger means harder prompts.")
    delta: PositiveFloat = Field(1.0, description="Negative advantages are divided by this.")

    def advantages(self, reward: Rewards, group: Groups) -> NDArray[np.float64]:
        """See `Advantage.advantages`."""
        groups = Grouped.clipped(reward, group)
        return (1.0 - groups.mean) ** (self.alpha - 1.0) * asymmetric(groups, self.delta)

    def closed_form(self, p: Curve) -> tuple[Curve, Curve]:
        """p q^alpha, and p q^alpha / delta for failures."""
        weight = p * (1.0 - p) ** self.alpha
        return weight, weight / self.delta
