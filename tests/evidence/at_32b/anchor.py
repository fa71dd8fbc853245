"""The absolute size of the gap at 32B: published figures of trained models, carried over by the measured laws.

Random models overstate it: their layers and heads have no margins. So only ratios are taken from them (between maps,
depths and widths), and the size from what others measured on trained models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PUBLISHED_KL = (0.0014, 0.0018)
"""Mean k3 of vLLM block-FP8 rollouts against a BF16 Megatron learner, Qwen3.5-9B (dense), first 20 steps and over 586
(NVIDIA-NeMo/RL, pull request 2744). It holds kernels as well as quantization."""
PUBLISHED_LAYERS, PUBLISHED_HIDDEN = 32, 4096
"""Of that model, as assumed here."""
PUBLISHED_MOE_KL = (0.0024, 0.0031)
"""The same for Qwen3.5-35B-A3B, where routing comes on top."""
LAYERS, HIDDEN = 64, 5120


@dataclass(frozen=True)
class Estimate:
    """A KL at 32B, nats a token."""

    low: float
    center: float
    high: float

    def scaled(self, factor: float) -> Estimate:
        return Estimate(self.low * factor, self.center * factor, self.high * factor)

    def token_ess(self, chi2_per_kl: float) -> tuple[float, float, float]:
        """Low, center and high ESS of a step's tokens."""
        values = sorted(1 / (1 + chi2_per_kl * kl) for kl in (self.low, self.center, self.high))
        return values[0], values[1], values[2]

    def sequence_ess(self, chi2_per_kl: float, length: int) -> tuple[float, float, float]:
        """The same of whole sequences: at most exp(-length chi^2)."""
        values = sorted(math.exp(-length * math.log1p(chi2_per_kl * kl)) for kl in (self.low, self.center, self.high))
        return values[0], values[1], values[2]


def at_32b(depth_exponents: tuple[float, float, float]) -> Estimate:
    """KL of block FP8 at 32B, from the published one; exponents of KL in depth: lowest, likeliest, highest."""
    deeper = LAYERS / PUBLISHED_LAYERS
    low, center, high = (deeper**exponent for exponent in depth_exponents)
    least, most = PUBLISHED_KL
    return Estimate(least * low, math.sqrt(least * most) * center, most * high)
