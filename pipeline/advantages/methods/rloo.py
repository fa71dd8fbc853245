"""rloo: reward minus the mean of the others (leave one out, arXiv 2402.14740)."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.advantages.base import Advantage, Curve, Groups, Rewards
from pipeline.advantages.groups import Grouped


class RLOO(Advantage):
    """r - mean of the others = (r - r̄) G / (G - 1), G being the size of the group."""

    name: Literal["rloo"] = "rloo"

    def advantages(self, reward: Rewards, group: Groups) -> NDArray[np.float64]:
        """See `Advantage.advantages`."""
        groups = Grouped.of(reward, group)
        factor = groups.sizes / np.maximum(groups.sizes - 1, 1)
        return groups.deviation * factor[groups.members]

    def closed_form(self, p: Curve) -> tuple[Curve, Curve]:
        """p q for both."""
        weight = p * (1.0 - p)
        return weight, weight
