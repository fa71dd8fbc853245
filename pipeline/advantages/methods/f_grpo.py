"""f_grpo: grpo with a focal weight (arXiv 2602.06717)."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from pipeline.advantages.base import Advantage, Curve, Groups, Rewards
from pipeline.advantages.groups import Grouped
from pipeline.advantages.methods.grpo import GRPO


class FGRPO(Advantage):
    """grpo × (1 - r̄)^gamma, with r̄ of rewards clipped to [0, 1]: the weight falls with the group's solve rate."""

    asks_what_is_solved: ClassVar[bool] = True
    name: Literal["f_grpo"] = "f_grpo"
    gamma: float = Field(1.0, ge=0.0, description="The group's advantages are multiplied by (1 - solve rate)^gamma.")

    def advantages(self, reward: Rewards, group: Groups) -> NDArray[np.float64]:
        """See `Advantage.advantages`."""
        failure_rate = 1.0 - Grouped.clipped(reward, group).mean
        return GRPO().advantages(reward, group) * failure_rate**self.gamma

    def closed_form(self, p: Curve) -> tuple[Curve, Curve]:
        """sqrt(p q) q^gamma for both."""
        weight = np.sqrt(p * (1.0 - p)) * (1.0 - p) ** self.gamma
        return weight, weight
