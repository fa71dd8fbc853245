"""M2PO: a trust region on the second moment of log-ratios, which, unlike the mean, cannot cancel (arXiv 2510.01161).

    loss = -1/N sum_t m_t rho_t A_t,   rho_t = pi(y_t) / pi_b(y_t),   m_t in {0, 1}

A token is harmful when the update would take it further from the engine: A > 0 with rho > 1, or A < 0 with rho < 1.
Three readings exist of the tokens that m drops; all keep a mean of (log ratio)^2 at or below a threshold:

`clip`, the authors' code (github.com/Infini-AI-Lab/M2PO, verl/trainer/ppo/core_algos.py): the widest bound tau, among
    the |log rho| of harmful tokens, with which the mean of min(|log rho|, tau)^2 over them is within the threshold;
    then PPO's clip of rho to [e^-tau, e^tau], never narrower than [1 - clip_low, 1 + clip_high]. A clipped token has no
    gradient, so clipping is dropping: the gradient is that of the clip, and the loss lacks only the clip's constants.
`mask`, the paper: harmful tokens are dropped from the largest |log rho| downwards until the mean of (log rho)^2 over
    the rest is within the threshold.
`areal` (github.com/inclusionAI/AReaL, areal/trainer/ppo/actor.py): as `mask`, but over all tokens and on
    (log pi_old - log pi_b)^2, with pi_old the learner's policy at the start of the stage: the engine's mismatch and
    staleness, not what this stage has learned. AReaL's weight pi_old / pi_b times its ratio pi / pi_old is rho. Its
    further clip of pi / pi_old and cap of pi_old / pi_b are not part of M2PO and not here.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from pydantic import Field, PositiveFloat

from precision.objectives.objective import (
    Facts,
    Objective,
    Prepared,
    ScoredStep,
    StepContext,
    TokenBatch,
    response_values,
    rollout_k3,
    sampled_mean,
    scaled_advantages,
    step_mean,
    token_sum,
)
from precision.ratios import masked_log_ratios
from precision.torch_on_use import Tensor, torch


class M2PO(Objective):
    """A trust region on the second moment of log-ratios. Dropped tokens stay in the denominator. Measured:
    `second_moment` (of the tokens that the variant looks at, before any is dropped); as shares of all tokens,
    `clip_hits_high` (dropped, A > 0), `clip_hits_low` (dropped, A < 0) and `clip_hits` (all dropped). Sums: `weight`
    (rho), `k3` (rho - 1 - log rho)."""

    name: Literal["m2po"] = "m2po"
    threshold: PositiveFloat = Field(
        0.04, description="Largest second moment of the log-ratios; .04 in the paper and in both repositories."
    )
    variant: Literal["clip", "mask", "areal"] = Field(
        "clip", description="clip: the authors' code; mask: the paper; areal: every token, engine against pi_old."
    )
    clip_low: float = Field(
        0.3,
        ge=0.0,
        lt=1.0,
        description="clip: ratios from 1 - clip_low to 1 + clip_high are never clipped, whatever the threshold. .3 and "
        ".5 are the defaults of the authors' function; their launch scripts set none, which is 0 and 0.",
    )
    clip_high: float = Field(0.5, ge=0.0, description="clip: see clip_low.")

    @property
    def facts(self) -> Facts:
        areal = self.variant == "areal"
        return replace(super().facts, reads_step_logprobs=not areal, needs_old_logprobs=areal)

    def prepare(self, step: ScoredStep) -> Prepared:
        """Set to 0 the advantage of the tokens to drop for the second moment of the whole step. Raises
        FloatingPointError when a log-ratio is not finite."""
        upper = step.old_logprobs if self.variant == "areal" else step.logprobs
        log_ratios = step.log_ratios(upper, step.rollout_logprobs)
        positive, negative = step.advantages > 0, step.advantages < 0
        looked_at = step.sampled
        if self.variant != "areal":
            looked_at = looked_at & ((positive & (log_ratios > 0)) | (negative & (log_ratios < 0)))
        magnitudes = log_ratios[looked_at].abs()
        if self.variant == "clip":
            bound = widest_cap(magnitudes, self.threshold)
            low, high = min(-bound, math.log1p(-self.clip_low)), max(bound, math.log1p(self.clip_high))
        else:
            high = widest_kept(magnitudes, self.threshold)
            low = -high
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

    def loss(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        mask = batch.mask
        _, ratios = masked_log_ratios(logprobs, batch.rollout_logprobs, mask)
        advantages = response_values(batch.advantages, mask, "advantages")
        sums = {"weight": token_sum(ratios, mask), "k3": rollout_k3(logprobs, batch)}
        return step_mean(-ratios * advantages, mask, context), sums


def widest_cap(magnitudes: Tensor, threshold: float) -> float:
    """Return the largest of `magnitudes` [n] such that the mean of their squares, each cut at its own, is at most
    `threshold`; inf when no cap is needed, 0 when not even the smallest will do."""
    ascending = magnitudes.sort().values
    squares = ascending.square()
    if not squares.numel() or float(squares.mean()) <= threshold:
        return math.inf
    above = torch.arange(len(squares) - 1, -1, -1, device=squares.device)
    capped_means = (squares.cumsum(0) + above * squares) / len(squares)
    within = ascending[capped_means <= threshold]
    return float(within[-1]) if within.numel() else 0.0


def widest_kept(magnitudes: Tensor, threshold: float) -> float:
    """Return the largest of `magnitudes` [n] such that the mean square of those up to it is at most `threshold`; -1,
    which keeps none, when even the smallest is above. Equal magnitudes stay or go together."""
    ascending = magnitudes.sort().values
    means = ascending.square().cumsum(0) / torch.arange(1, len(ascending) + 1, device=ascending.device)
    last_of_its_value = torch.ones_like(ascending, dtype=torch.bool)
    last_of_its_value[:-1] = ascending[1:] > ascending[:-1]
    within = ascending[(means <= threshold) & last_of_its_value]
    return float(within[-1]) if within.numel() else -1.0
