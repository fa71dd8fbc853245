"""maxrl: maximum-likelihood reinforcement learning (arXiv 2602.02710)."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.advantages.base import Advantage, Curve, Groups, Rewards
from pipeline.advantages.groups import Grouped


class MaxRL(Advantage):
    """(r - r̄) / r̄ of rewards clipped to [0, 1], 0 in a group without any success: the gradient of log p, up to order
    G - 1 of its expansion in pass@k."""

    asks_what_is_solved: ClassVar[bool] = True
    name: Literal["maxrl"] = "maxrl"

    def advantages(self, reward: Rewards, group: Groups) -> NDArray[np.float64]:
        """See `Advantage.advantages`."""
        groups = Grouped.clipped(reward, group)
        return groups.deviation / np.where(groups.mean > 0.0, groups.mean, 1.0)

    def closed_form(self, p: Curve) -> tuple[Curve, Curve]:
        """q for both, but 0 at p = 0: no group, however large, has a success there, and the advantages are 0. The limit
        from above is 1."""
        weight = np.where(p > 0.0, 1.0 - p, 0.0)
        return weight, weight
