"""What the corrections share: the ratio k of a token or its response, bounds, the veto, and shares by sign of A."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from precision.objectives.base import ScoredStep
from precision.objectives.tokens import sampled_mean

Level = Literal["token", "sequence", "geometric"]
"""Whose ratio k is: the token's own, the product over its response, or the geometric mean over its response."""

LOG_RATIO_LIMIT = 20.0
"""Nats. log k is clamped to this before exp, as in verl and slime: no product over a long response overflows."""


def mismatch_ratios(step: ScoredStep, level: Level) -> Tensor:
    """k: float64 [tokens], finite and above 0, 1 where not sampled. Raises FloatingPointError on logprobs that are not
    finite."""
    log_ratios = step.log_ratios(step.old_logprobs, step.rollout_logprobs)
    if level != "token":
        of_rows = step.row_sum(log_ratios) if level == "sequence" else step.row_mean(log_ratios)
        log_ratios = torch.where(step.sampled, of_rows[step.row], 0.0)
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def vetoed(step: ScoredStep, threshold: float) -> Tensor:
    """bool [tokens]: all tokens of a response in which any token's own k (never clamped) is below `threshold`; 0 vetoes
    nothing."""
    ratios = step.log_ratios(step.old_logprobs, step.rollout_logprobs).exp()
    return (step.row_sum(ratios < threshold) > 0)[step.row]


def measured(step: ScoredStep, factor: Tensor, name: str, hit: Tensor) -> dict[str, float]:
    """`correction_factor` (its mean over sampled tokens), and `correction_NAME_positive` and `_negative`: tokens in
    `hit` (bool [tokens]) with A > 0 and with A < 0, as shares of all sampled tokens."""
    return {
        "correction_factor": sampled_mean(step, factor),
        f"correction_{name}_positive": sampled_mean(step, hit & (step.advantages > 0)),
        f"correction_{name}_negative": sampled_mean(step, hit & (step.advantages < 0)),
    }


def check_bounds(low: float, high: float, advice: str) -> None:
    """Raises ValueError unless 0 <= low < high; `advice` names usual values."""
    if not 0.0 <= low < high:
        raise ValueError(f"low is {low} and high {high}; expected 0 <= low < high; {advice}")


def check_veto(threshold: float) -> None:
    """Raises ValueError unless 0 <= threshold < 1: at 1 every response would be dropped."""
    if not 0.0 <= threshold < 1.0:
        raise ValueError(f"veto is {threshold}, expected 0 (off) to below 1; slime's is 1e-4")
