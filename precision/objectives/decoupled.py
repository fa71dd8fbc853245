"""Decoupled PPO: the clip is around the learner's own recent policy, not around the one that sampled (arXiv 2110.00641;
for language models AReaL, arXiv 2505.24298).

    loss = -1/N sum_t sg(b_t) min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)
    b_t = pi_prox(y_t) / pi_b(y_t),   r_t = pi(y_t) / pi_prox(y_t)

with pi_b the engine that sampled y_t, pi_prox the learner when its stage began and sg stop-gradient. Staleness and the
engine's other numerics then weigh a token, and do not use up the room of the clip. In a stage of a single step pi_prox
is the policy before that step, so r is 1: what is left is the importance weight b, and the clip never acts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from precision.objectives.base import Prepared, ScoredStep, StepContext, TokenBatch
from precision.objectives.clipped import check_clip, clipped_loss, prepared_anchor
from precision.objectives.tokens import sampled_mean, scaled_advantages


@dataclass(frozen=True, kw_only=True)
class Decoupled:
    """`mismatch_cap` is the largest b that counts as it is; 5 was the default of AReaL's code. Above it a token is
    dropped (`over_cap` "mask", AReaL's) or keeps the weight `mismatch_cap` ("truncate"). Dropped tokens stay in N.

    Measured: `cap_hits` (share of tokens with b above the cap), `weight` (mean of b as it was used). Sums: see
    `clipped_loss`. Raises ValueError for bounds out of range.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    mismatch_cap: float = 5.0
    over_cap: Literal["mask", "truncate"] = "mask"

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)
        if not (math.isfinite(self.mismatch_cap) and self.mismatch_cap >= 1.0):
            raise ValueError(
                f"mismatch_cap is {self.mismatch_cap}, expected a finite number of at least 1; AReaL's was 5"
            )

    @property
    def needs_scoring(self) -> bool:
        return True

    def prepare(self, step: ScoredStep) -> Prepared:
        """b as a factor on the advantages, pi_prox as the anchor. Raises FloatingPointError on a log-ratio that is not
        finite."""
        behavior = step.log_ratios(step.old_logprobs, step.rollout_logprobs).exp()
        over = behavior > self.mismatch_cap
        weights = torch.where(over, 0.0 if self.over_cap == "mask" else self.mismatch_cap, behavior)
        return Prepared(
            advantages=scaled_advantages(step, weights),
            anchor_logprobs=step.old_logprobs,
            measured={"cap_hits": sampled_mean(step, over), "weight": sampled_mean(step, weights)},
        )

    def __call__(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and sums of one micro-batch; see `Objective`.

        Raises FloatingPointError when a log-ratio or an advantage under the mask is not finite, ValueError when the
        anchor was not prepared.
        """
        return clipped_loss(
            logprobs,
            batch,
            context,
            anchor_logprobs=prepared_anchor(batch),
            bounds=(1.0 - self.clip_low, 1.0 + self.clip_high),
        )
