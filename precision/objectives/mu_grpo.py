"""Mu-GRPO: a relaxed clip and a veto on failed responses, for many updates on one set of rollouts (arXiv 2605.17570).

    loss = -1/N sum_t k_t min(rho_t A_t, clip(rho_t, ratio_min, ratio_max) A_t),   rho_t = pi(y_t) / pi_b(y_t)

with pi_b the engine that sampled y_t, frozen for the whole stage, and k_t 0 on vetoed tokens, 1 elsewhere.

With [0, 5] the minimum stops nothing but A > 0, rho > 5. A token with A < 0 is never clipped and its gradient grows
with rho; the negative-advantage veto is all that holds it. In responses with A < 0 it looks for trigger tokens and
drops what follows the first of them: the current policy would hardly have written that prefix, so what comes after it
says little about the current policy.

The paper's full text was not at hand. Known from its abstract and figures: the range [0, 5], that the veto concerns
responses with negative advantage, and that dropping what follows a trigger (or more) keeps training stable where
dropping the triggers alone does not. Open, hence options: which ratios trigger (`trigger`, `kappa`), and what exactly
is dropped (`scope`, `keeps_trigger`; also, whether later triggers inside the dropped suffix stay: here they go with
it). So this is a reading of the paper, not a reproduction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from precision.objectives.base import Prepared, ScoredStep, StepContext, TokenBatch
from precision.objectives.clipped import clipped_loss
from precision.objectives.tokens import sampled_mean, scaled_advantages


@dataclass(frozen=True, kw_only=True)
class MuGRPO:
    """`trigger`: a token of a response with A < 0 whose ratio is "below" or "above" `kappa`; "none": no veto. Default
    below .3: of .3 and .8 below and 1.5 above it controlled the ratios best in our toy runs.

    `scope`: what is dropped there: "suffix", all that follows the first trigger (and that itself unless
    `keeps_trigger`); "token", the triggers; "response", all of it.

    Measured: `veto_tokens` (share of tokens dropped), `veto_responses` (share of responses with a trigger),
    `ratio_max_negative` (largest rho with A < 0; 0 without any). Sums: see `clipped_loss`. Raises ValueError for values
    out of range, and for a `kappa` that makes a trigger of rho = 1.
    """

    ratio_min: float = 0.0
    ratio_max: float = 5.0
    trigger: Literal["below", "above", "none"] = "below"
    kappa: float = 0.3
    scope: Literal["suffix", "token", "response"] = "suffix"
    keeps_trigger: bool = True

    def __post_init__(self) -> None:
        if not (0.0 <= self.ratio_min <= 1.0 <= self.ratio_max):
            raise ValueError(
                f"ratio_min is {self.ratio_min} and ratio_max {self.ratio_max}; expected 0 <= ratio_min <= 1 <= "
                "ratio_max; 0 and 5 are the paper's"
            )
        if self.trigger != "none" and not (0.0 < self.kappa < math.inf and self._spares_on_policy_tokens()):
            raise ValueError(
                f"kappa is {self.kappa} with trigger {self.trigger}; expected at most 1 below and at least 1 above: "
                "exactly on-policy tokens must not be vetoed; try .3 below or 1.5 above"
            )

    def _spares_on_policy_tokens(self) -> bool:
        return self.kappa <= 1.0 if self.trigger == "below" else self.kappa >= 1.0

    @property
    def needs_scoring(self) -> bool:
        return True

    def prepare(self, step: ScoredStep) -> Prepared:
        """The veto at the current weights, as factors on the advantages. Raises FloatingPointError on a log-ratio that
        is not finite."""
        log_ratios = step.log_ratios(step.logprobs, step.rollout_logprobs)
        negative = step.sampled & (step.advantages < 0)
        triggers = negative & self._triggers(log_ratios)
        dropped = negative & self._dropped(step, triggers)
        return Prepared(
            advantages=scaled_advantages(step, (~dropped).double()),
            measured={
                "veto_tokens": sampled_mean(step, dropped),
                "veto_responses": float((step.row_sum(triggers) > 0).double().mean()),
                "ratio_max_negative": float(log_ratios[negative].max().exp()) if bool(negative.any()) else 0.0,
            },
        )

    def _triggers(self, log_ratios: Tensor) -> Tensor:
        if self.trigger == "none":
            return torch.zeros_like(log_ratios, dtype=torch.bool)
        bound = math.log(self.kappa)
        return log_ratios < bound if self.trigger == "below" else log_ratios > bound

    def _dropped(self, step: ScoredStep, triggers: Tensor) -> Tensor:
        if self.scope == "token":
            return triggers
        if self.scope == "response":
            return (step.row_sum(triggers) > 0)[step.row]
        never = torch.iinfo(torch.int64).max
        first = torch.full((step.num_rows,), never, dtype=torch.int64, device=step.row.device)
        first = first.scatter_reduce(0, step.row[triggers], step.position[triggers], "amin")[step.row]
        return step.position > first if self.keeps_trigger else step.position >= first

    def __call__(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and sums of one micro-batch; see `Objective`.

        Raises FloatingPointError when a log-ratio or an advantage under the mask is not finite.
        """
        return clipped_loss(
            logprobs,
            batch,
            context,
            anchor_logprobs=batch.rollout_logprobs,
            bounds=(self.ratio_min, self.ratio_max),
        )
