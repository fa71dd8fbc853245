"""The clipped surrogate of PPO (arXiv 1707.06347, Eq. 7) over tokens, as GRPO (arXiv 2402.03300) uses it, with DAPO's
separate upper bound and token-level mean (arXiv 2503.14476).

    loss = -1/N sum_t min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)

The minimum is pessimistic: only A > 0 with rho above and A < 0 with rho below lose their gradient. A token with A < 0
and a large rho is never clipped, and its gradient grows with rho, unless `dual_clip` bounds it (arXiv 1912.09729):
where A < 0 the term is max(min(...), dual_clip A).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from precision.objectives.base import Prepared, ScoredStep, StepContext, TokenBatch
from precision.objectives.tokens import response_values, rollout_k3, step_mean, token_sum
from precision.ratios import masked_log_ratios


def check_clip(clip_low: float, clip_high: float) -> None:
    """Raises ValueError unless `clip_low` is in [0, 1] and `clip_high` at least 0 (infinity: no ceiling)."""
    if not (0.0 <= clip_low <= 1.0 and clip_high >= 0.0):
        raise ValueError(
            f"clip_low is {clip_low} and clip_high {clip_high}; expected clip_low in [0, 1] and clip_high >= 0; "
            ".2 and .2 are PPO's"
        )


def prepared_anchor(batch: TokenBatch) -> Tensor:
    """`batch.anchor_logprobs`. Raises ValueError when the step was not prepared."""
    if batch.anchor_logprobs is None:
        raise ValueError("anchor_logprobs is None, expected [batch, sequence] log-probabilities; call `prepare` first")
    return batch.anchor_logprobs


def clipped_loss(
    logprobs: Tensor,
    batch: TokenBatch,
    context: StepContext,
    *,
    anchor_logprobs: Tensor,
    bounds: tuple[float, float],
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and sums of one micro-batch for rho = pi / anchor and `bounds` = (floor, ceiling) of rho.

    Sums: `clip_hits_high` (A > 0, rho above), `clip_hits_low` (A < 0, rho below), `clip_hits` (both), `dual_clip_hits`
    (A < 0, rho above `dual_clip`; only where that is set) and `k3` (against the sampler, whatever the anchor). Raises
    FloatingPointError when a log-ratio or an advantage under the mask is not finite.
    """
    mask = batch.mask
    _, ratios = masked_log_ratios(logprobs, anchor_logprobs, mask)
    advantages = response_values(batch.advantages, mask, "advantages")
    surrogate = torch.minimum(ratios * advantages, ratios.clamp(*bounds) * advantages)
    high = (ratios > bounds[1]) & (advantages > 0)
    low = (ratios < bounds[0]) & (advantages < 0)
    sums = {
        "clip_hits": token_sum(high | low, mask),
        "clip_hits_high": token_sum(high, mask),
        "clip_hits_low": token_sum(low, mask),
        "k3": rollout_k3(logprobs, batch),
    }
    if dual_clip is not None:
        bounded = (ratios > dual_clip) & (advantages < 0)
        surrogate = torch.where(bounded, dual_clip * advantages, surrogate)
        sums["dual_clip_hits"] = token_sum(bounded, mask)
    return step_mean(-surrogate, mask, context), sums


@dataclass(frozen=True, kw_only=True)
class Clipped:
    """PPO and GRPO: .2 and .2; DAPO: .2 and .28. `clip_low` is in [0, 1], `clip_high` at least 0; `dual_clip` is above
    1, the paper's is 3.

    `anchor` is what the ratio divides by: "rollout", the engine's probability, so that the clip sees its mismatch too;
    or "old", the learner's own when its stage began, as where trainers recompute the old log-probabilities. The
    latter reads `Prepared.anchor_logprobs`.

    Sums: see `clipped_loss`. Raises ValueError for bounds out of range.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    anchor: Literal["rollout", "old"] = "rollout"

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)
        if self.dual_clip is not None and not self.dual_clip > 1.0:
            raise ValueError(f"dual_clip is {self.dual_clip}, expected more than 1, or None; dual-clip PPO's is 3")

    @property
    def needs_scoring(self) -> bool:
        return self.anchor == "old"

    def prepare(self, step: ScoredStep) -> Prepared:
        """The proximal policy becomes the anchor."""
        return Prepared(advantages=step.advantages, anchor_logprobs=step.old_logprobs)

    def __call__(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and sums of one micro-batch; see `Objective`.

        Raises FloatingPointError when a log-ratio or an advantage under the mask is not finite, ValueError when the
        anchor was not prepared.
        """
        return clipped_loss(
            logprobs,
            batch,
            context,
            anchor_logprobs=prepared_anchor(batch) if self.anchor == "old" else batch.rollout_logprobs,
            bounds=(1.0 - self.clip_low, 1.0 + self.clip_high),
            dual_clip=self.dual_clip,
        )
