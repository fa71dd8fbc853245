"""OPSM: off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556).

    factor = 0 if A < 0 and mean_t log(pi_b(y_t) / pi(y_t)) > delta, else 1

Failed responses that the learner has meanwhile moved away from are dropped: pushing them down further teaches little
and its gradient is unbounded. pi_b is the engine that sampled, so its mismatch is part of the distance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from precision.corrections.engine_ratios import measured
from precision.objectives.base import ScoredStep


@dataclass(frozen=True, kw_only=True)
class OPSM:
    """`delta`: nats a token, the mean over a response; 1e-4 in slime (`--opsm-delta`).

    Measured: `correction_factor` (mean), `correction_masked_positive` (always 0) and `_negative` (share of all tokens
    that are dropped). Raises ValueError for a delta out of range.
    """

    delta: float = 1e-4

    def __post_init__(self) -> None:
        if not (math.isfinite(self.delta) and self.delta >= 0.0):
            raise ValueError(f"delta is {self.delta}, expected a finite number of at least 0; slime's is 1e-4")

    def __call__(self, step: ScoredStep) -> tuple[Tensor, dict[str, float]]:
        """See `Correction`. Advantages decide token by token, as in the paper; usually a response has just one."""
        distance = step.row_mean(step.log_ratios(step.rollout_logprobs, step.logprobs))
        masked = (step.advantages < 0) & (distance > self.delta)[step.row]
        factor = (~masked).double()
        return factor, measured(step, factor, "masked", masked)
