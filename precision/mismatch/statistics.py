"""How far two sets of logprobs of the same tokens are apart, in four numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from precision.ratios import RatioSums


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Learner against engine over `num_tokens` tokens."""

    num_tokens: int
    max_abs: float
    """Largest |log pi_learner - log pi_engine|, nats."""
    mean_abs: float
    """Mean |log pi_learner - log pi_engine|, nats."""
    k3: float
    """KL(engine || learner) in nats, k3 estimate; an expectation only if the engine sampled the tokens."""
    ess: float
    """Token ESS, in [1/num_tokens, 1]; 1 is agreement."""


def gap(learner: Tensor, engine: Tensor, mask: Tensor | None = None) -> Gap:
    """Compare logprobs (nats) of any one shape; `mask` is bool of that shape, None means every token.

    Raises FloatingPointError when a compared pair is not finite, ValueError when shapes differ or nothing is compared.
    """
    selected = torch.ones_like(learner, dtype=torch.bool) if mask is None else mask
    sums = RatioSums.from_logprobs(learner, engine, selected)
    return Gap(
        num_tokens=sums.num_tokens,
        max_abs=sums.max_abs_log_ratio,
        mean_abs=sums.mean_abs_log_ratio,
        k3=sums.k3_kl,
        ess=sums.ess,
    )
