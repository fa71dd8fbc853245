"""asym_grpo: failures weigh more, or less, than successes (a probe of FADE's paper, arXiv 2607.01490)."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat

from pipeline.advantages.base import Advantage, Curve, Groups, Rewards
from pipeline.advantages.groups import Grouped


class AsymGRPO(Advantage):
    """r - r̄, divided by delta where negative."""

    name: Literal["asym_grpo"] = "asym_grpo"
    delta: PositiveFloat = Field(0.5, description="Negative advantages are divided by this.")

    def advantages(self, reward: Rewards, group: Groups) -> NDArray[np.float64]:
        """See `Advantage.advantages`."""
        return asymmetric(Grouped.of(reward, group), self.delta)

    def closed_form(self, p: Curve) -> tuple[Curve, Curve]:
        """p q, and p q / delta for failures."""
        return p * (1.0 - p), p * (1.0 - p) / self.delta


def asymmetric(groups: Grouped, delta: float) -> NDArray[np.float64]:
    """[n] value minus group mean, divided by `delta` where negative."""
    return np.where(groups.deviation < 0.0, groups.deviation / delta, groups.deviation)
