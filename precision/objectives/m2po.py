"""M2PO: a trust region on the second moment of log-ratios (arXiv 2510.01161), which, unlike their mean, cannot cancel.

    loss = -1/N sum_t m_t rho_t A_t,   rho_t = pi(y_t) / pi_b(y_t),   m_t in {0, 1}

A token is harmful when the update would take it further from the sampler: A > 0 with rho > 1, or A < 0 with rho < 1.
Three readings of which tokens m drops exist; all keep a mean of (log ratio)^2 at or below a threshold:

`clip`, the authors' code (github.com/Infini-AI-Lab/M2PO, verl/trainer/ppo/core_algos.py): the widest bound tau, among
    the |log rho| of harmful tokens, with which the mean of min(|log rho|, tau)^2 over them is within the threshold;
    then PPO's clip of rho to [e^-tau, e^tau], never narrower than [.7, 1.5]. A clipped token has no gradient, so
    clipping is dropping: the gradient is that of the clip, and the loss lacks only the clip's constants.
`mask`, the paper: harmful tokens are dropped from the largest |log rho| downwards until the mean of (log rho)^2 over
    those that remain is within the threshold.
`areal` (github.com/inclusionAI/AReaL, areal/trainer/ppo/actor.py): as `mask`, but over all tokens and on
    (log pi_prox - log pi_b)^2, with pi_prox the learner's policy at the start of the stage: what the engine's mismatch
    and staleness brought in, not what this stage has learned. AReaL's weight pi_prox / pi_b times its ratio
    pi / pi_prox is rho. Its further clip of pi / pi_prox and cap of pi_prox / pi_b are not part of M2PO and not here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from precision.objectives.base import Prepared, ScoredStep, StepContext, TokenBatch
from precision.objectives.tokens import (
    response_values,
    rollout_k3,
    sampled_mean,
    scaled_advantages,
    step_mean,
    token_sum,
)
from precision.ratios import masked_log_ratios


@dataclass(frozen=True, kw_only=True)
class M2PO:
    """`threshold`: .04 in the paper and in both repositories. `clip_low` and `clip_high`: the narrowest band that the
    variant `clip` may come to, .3 and .5 by default in the authors' function; their launch scripts pass none (0 and 0).

    Dropped tokens stay in the denominator. Measured: `second_moment` (of the tokens that the variant looks at, before
    any is dropped); as shares of all tokens, `clip_hits_high` (dropped, A > 0), `clip_hits_low` (dropped, A < 0) and
    `clip_hits` (all dropped). Sums: `weight` (rho), `k3` (rho - 1 - log rho).

    Raises ValueError for numbers out of range.
    """

    threshold: float = 0.04
    variant: Literal["clip", "mask", "areal"] = "clip"
    clip_low: float = 0.3
    clip_high: float = 0.5

    def __post_init__(self) -> None:
        if not (math.isfinite(self.threshold) and self.threshold > 0.0):
            raise ValueError(f"threshold is {self.threshold}, expected a finite number above 0; M2PO's is .04")
        if not (0.0 <= self.clip_low < 1.0 and self.clip_high >= 0.0):
            raise ValueError(
                f"clip_low is {self.clip_low} and clip_high {self.clip_high}; expected clip_low in [0, 1) and "
                "clip_high >= 0; .3 and .5 are the authors'"
            )

    @property
    def needs_scoring(self) -> bool:
        return True

    def prepare(self, step: ScoredStep) -> Prepared:
        """Zero the advantage of the tokens that the second moment of the whole step asks to drop.

        Raises FloatingPointError when a log-ratio is not finite.
        """
        upper = step.old_logprobs if self.variant == "areal" else step.logprobs
        log_ratios = step.log_ratios(upper, step.rollout_logprobs)
        positive, negative = step.advantages > 0, step.advantages < 0
        looked_at = step.sampled
        if self.variant != "areal":
            looked_at = looked_at & ((positive & (log_ratios > 0)) | (negative & (log_ratios < 0)))
        magnitudes = log_ratios[looked_at].abs()
        low, high = self._band(magnitudes)
        dropped = looked_at & ((log_ratios < low) | (log_ratios > high))
        return Prepared(
            advantages=scaled_advantages(step, (~dropped).double()),
            measured={
                "second_moment": float(magnitudes.square().mean()) if magnitudes.numel() else 0.0,
                "clip_hits": sampled_mean(step, dropped),
                "clip_hits_high": sampled_mean(step, dropped & positive),
                "clip_hits_low": sampled_mean(step, dropped & negative),
            },
        )

    def _band(self, magnitudes: Tensor) -> tuple[float, float]:
        """The log-ratios between which a token stays, in nats."""
        if self.variant == "clip":
            bound = widest_cap(magnitudes, self.threshold)
            return min(-bound, math.log1p(-self.clip_low)), max(bound, math.log1p(self.clip_high))
        bound = widest_kept(magnitudes, self.threshold)
        return -bound, bound

    def __call__(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and sums of one micro-batch; see `Objective`.

        Raises FloatingPointError when a log-ratio or an advantage under the mask is not finite.
        """
        mask = batch.mask
        _, ratios = masked_log_ratios(logprobs, batch.rollout_logprobs, mask)
        advantages = response_values(batch.advantages, mask, "advantages")
        sums = {"weight": token_sum(ratios, mask), "k3": rollout_k3(logprobs, batch)}
        return step_mean(-ratios * advantages, mask, context), sums


def widest_cap(magnitudes: Tensor, threshold: float) -> float:
    """The largest of `magnitudes` [n] such that the mean of their squares, none counted above its own, is at most
    `threshold`; inf when no cap is needed, 0 when not even the smallest will do."""
    ascending = magnitudes.sort().values
    squares = ascending.square()
    if not squares.numel() or float(squares.mean()) <= threshold:
        return math.inf
    above = torch.arange(len(squares) - 1, -1, -1, device=squares.device)
    capped_means = (squares.cumsum(0) + above * squares) / len(squares)
    return _last(ascending[capped_means <= threshold], otherwise=0.0)


def widest_kept(magnitudes: Tensor, threshold: float) -> float:
    """The largest of `magnitudes` [n] such that the mean square of those up to it is at most `threshold`; -1, which
    keeps none, when even the smallest is above. Equal ones stay or go together, so that order cannot matter."""
    ascending = magnitudes.sort().values
    means = ascending.square().cumsum(0) / torch.arange(1, len(ascending) + 1, device=ascending.device)
    last_of_its_value = torch.ones_like(ascending, dtype=torch.bool)
    last_of_its_value[:-1] = ascending[1:] > ascending[:-1]
    return _last(ascending[(means <= threshold) & last_of_its_value], otherwise=-1.0)


def _last(ascending: Tensor, *, otherwise: float) -> float:
    return float(ascending[-1]) if ascending.numel() else otherwise
