"""dr_grpo: reward minus group mean (Dr. GRPO, arXiv 2503.20783); ScaleRL's with `batch_normalized`."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from pipeline.advantages.base import Advantage, Curve, Groups, Rewards
from pipeline.advantages.groups import Grouped
from precision.objectives.base import Aggregation


class DrGRPO(Advantage):
    """r - r̄. The paper also divides the sum over tokens by a constant, hence the default of `aggregation`."""

    name: Literal["dr_grpo"] = "dr_grpo"
    aggregation: Aggregation = Field("constant", description=Advantage.model_fields["aggregation"].description)

    def advantages(self, reward: Rewards, group: Groups) -> NDArray[np.float64]:
        """See `Advantage.advantages`."""
        return Grouped.of(reward, group).deviation

    def closed_form(self, p: Curve) -> tuple[Curve, Curve]:
        """p q for both."""
        weight = p * (1.0 - p)
        return weight, weight
