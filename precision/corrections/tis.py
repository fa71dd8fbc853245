"""TIS: truncated importance sampling between the engine and the learner (fengyao.notion.site/off-policy-rl; the
truncation is that of Ionides, 2008).

    factor = min(k, cap)

Biased towards the engine's distribution where k is above the cap, with a variance that the cap bounds.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, PositiveFloat

from precision.corrections.base import MEAN_FACTOR, Correction
from precision.corrections.engine_ratios import measured, mismatch_ratios
from precision.measures import Measure
from precision.objectives.base import ScoredStep
from precision.torch_on_use import Tensor


class TIS(Correction):
    """log k is clamped to +-20, which matters for caps above e^20 only.

    Measured: `correction_factor` (mean), `correction_capped_positive` and `_negative` (share of all tokens above the
    cap, by sign of A).
    """

    name: Literal["tis"] = "tis"
    cap: PositiveFloat = Field(2.0, description="Largest pi_old / pi_engine; 2 in verl and slime.")
    level: Literal["token", "sequence"] = Field("token", description="One ratio a token, or its response's product.")

    reads_step_logprobs: ClassVar[bool] = False
    measures: ClassVar[tuple[Measure, ...]] = (
        Measure(
            "Tokens over the correction's cap",
            (("correction_capped_positive", "A > 0", "blue"), ("correction_capped_negative", "A < 0", "orange")),
            percent=True,
            floor=0.0,
        ),
        MEAN_FACTOR,
    )

    def factor(self, step: ScoredStep) -> tuple[Tensor, dict[str, float]]:
        """See `Correction.factor`."""
        ratios = mismatch_ratios(step, self.level)
        factor = ratios.clamp(max=self.cap)
        return factor, measured(step, factor, "capped", ratios > self.cap)
