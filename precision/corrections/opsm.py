"""OPSM: off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556).

    factor = 0 if A < 0 and mean_t log(pi_b(y_t) / pi(y_t)) > delta, else 1

Failed responses that the learner has meanwhile moved away from are dropped: pushing them down further teaches little
and its gradient is unbounded. pi_b is the engine that sampled, so its mismatch is part of the distance.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, NonNegativeFloat

from precision.corrections.base import Correction
from precision.corrections.engine_ratios import measured
from precision.objectives.base import ScoredStep
from precision.torch_on_use import Tensor


class OPSM(Correction):
    """Advantages decide token by token, as in the paper; usually a response has just one.

    Measured: `correction_factor` (mean), `correction_masked_positive` (always 0) and `_negative` (share of all tokens
    that are dropped).
    """

    name: Literal["opsm"] = "opsm"
    delta: NonNegativeFloat = Field(
        1e-4, description="Largest mean log-ratio of a failed response, nats a token; 1e-4 in slime (--opsm-delta)."
    )

    weighs_by_old_ratio: ClassVar[bool] = False
    drops_what_the_learner_left: ClassVar[bool] = True

    def factor(self, step: ScoredStep) -> tuple[Tensor, dict[str, float]]:
        """See `Correction.factor`."""
        distance = step.row_mean(step.log_ratios(step.rollout_logprobs, step.logprobs))
        masked = (step.advantages < 0) & (distance > self.delta)[step.row]
        factor = (~masked).double()
        return factor, measured(step, factor, "masked", masked)
