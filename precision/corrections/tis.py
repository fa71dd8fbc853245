"""TIS: truncated importance sampling between the engine and the learner (fengyao.notion.site/off-policy-rl; the
truncation is that of Ionides, 2008).

    factor = min(k, cap)

Biased towards the engine's distribution where k is above the cap, with a variance that the cap bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from precision.corrections.engine_ratios import measured, mismatch_ratios
from precision.objectives.base import ScoredStep


@dataclass(frozen=True, kw_only=True)
class TIS:
    """`cap`: 2 in verl (`rollout_is_threshold`) and slime (`--tis-clip`). `level`: one k a token, or the product over
    the response. log k is clamped to +-20, which matters for caps above e^20 only.

    Measured: `correction_factor` (mean), `correction_capped_positive` and `_negative` (share of all tokens above the
    cap, by sign of A). Raises ValueError for a cap out of range.
    """

    cap: float = 2.0
    level: Literal["token", "sequence"] = "token"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.cap) and self.cap > 0.0):
            raise ValueError(f"cap is {self.cap}, expected a finite number above 0; 2 is usual")

    def __call__(self, step: ScoredStep) -> tuple[Tensor, dict[str, float]]:
        """See `Correction`."""
        ratios = mismatch_ratios(step, self.level)
        factor = ratios.clamp(max=self.cap)
        return factor, measured(step, factor, "capped", ratios > self.cap)
