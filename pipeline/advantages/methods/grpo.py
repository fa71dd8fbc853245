"""grpo: the reward's z-score within its group (DeepSeekMath, arXiv 2402.03300, text at eq. 3).

s is the sample standard deviation (size - 1 in the denominator), as torch.std computes it, which the common GRPO
trainers call; the paper does not say which is meant. The population one would scale every advantage by
sqrt(G / (G - 1)), G being the size of the group.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.advantages.base import Advantage, Curve, Groups, Rewards
from pipeline.advantages.groups import Grouped

GRPO_EPSILON = 1e-6
"""Added to s, so that nearly equal rewards do not divide by nearly 0."""


class GRPO(Advantage):
    """(r - r̄) / (s + 1e-6)."""

    name: Literal["grpo"] = "grpo"

    def advantages(self, reward: Rewards, group: Groups) -> NDArray[np.float64]:
        """See `Advantage.advantages`."""
        groups = Grouped.of(reward, group)
        return groups.deviation / (groups.std + GRPO_EPSILON)

    def closed_form(self, p: Curve) -> tuple[Curve, Curve]:
        """sqrt(p q) for both."""
        weight = np.sqrt(p * (1.0 - p))
        return weight, weight
