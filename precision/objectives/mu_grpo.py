"""Mu-GRPO: a relaxed clip and a veto on failed responses, for many updates on one set of rollouts (arXiv 2605.17570).

    loss = -1/N sum_t k_t min(rho_t A_t, clip(rho_t, ratio_min, ratio_max) A_t),   rho_t = pi(y_t) / pi_b(y_t)

pi_b is the engine that sampled y_t, frozen for the whole stage, and k_t is 0 on vetoed tokens, 1 elsewhere.

With [0, 5] the minimum stops nothing but A > 0, rho > 5. A token with A < 0 is never clipped and its gradient grows
with rho; only the negative-advantage veto holds it. In responses with A < 0 the veto looks for trigger tokens and drops
what follows the first: the current policy would hardly have written that prefix, so the rest says little about it.

The paper's full text was not at hand. Known from its abstract and figures: the range [0, 5], that the veto concerns
responses with negative advantage, and that dropping what follows a trigger (or more) keeps training stable where
dropping the triggers alone does not. Open, hence options: which ratios trigger (`trigger`, `kappa`), and what exactly
is dropped (`scope`, `keeps_trigger`). Later triggers inside the dropped suffix, open too, go with it here. So this is a
reading of the paper, not a reproduction.
"""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from precision.objectives.clipped import clipped_loss
from precision.objectives.objective import (
    Objective,
    Prepared,
    ScoredStep,
    StepContext,
    TokenBatch,
    sampled_mean,
    scaled_advantages,
)
from precision.ratios import positions
from precision.torch_on_use import Tensor, torch


class MuGRPO(Objective):
    """A relaxed clip and a veto on failed responses. Measured: `veto_tokens` (share of tokens dropped),
    `veto_responses` (of responses with a trigger), `ratio_max_negative` (largest rho with A < 0, or 0). Sums: see
    `clipped_loss`."""

    name: Literal["mu_grpo"] = "mu_grpo"
    ratio_min: float = Field(0.0, ge=0.0, le=1.0, description="The ratio's floor; 0 is the paper's.")
    ratio_max: float = Field(5.0, ge=1.0, description="The ratio's ceiling; 5 is the paper's.")
    trigger: Literal["below", "above", "none"] = Field(
        "below",
        description="Veto: where A < 0, a token triggers when its ratio is below (above) kappa. none turns it off.",
    )
    kappa: PositiveFloat = Field(
        0.3, description="See trigger. Of .3 and .8 below and 1.5 above, .3 held the ratios best in our toy runs."
    )
    scope: Literal["suffix", "token", "response"] = Field(
        "suffix",
        description="What a trigger drops. suffix: all that follows the response's first trigger; token: the triggers "
        "alone; response: all of it.",
    )
    keeps_trigger: bool = Field(True, description="suffix: whether the first trigger itself is still trained on.")

    @model_validator(mode="after")
    def _spares_on_policy_tokens(self) -> Self:
        if (self.trigger == "below" and self.kappa > 1.0) or (self.trigger == "above" and self.kappa < 1.0):
            raise ValueError(
                f"kappa {self.kappa} with trigger {self.trigger} would veto tokens whose ratio is 1; use at most 1 "
                "below (.3) and at least 1 above (1.5)"
            )
        return self

    def prepare(self, step: ScoredStep) -> Prepared:
        """Make the veto at the current weights a factor on the advantages. Raises as `Objective.prepare`."""
        log_ratios = step.log_ratios(step.logprobs, step.rollout_logprobs)
        negative = step.sampled & (step.advantages < 0)
        bound = math.log(self.kappa)
        far = {"below": log_ratios < bound, "above": log_ratios > bound}.get(self.trigger)
        triggers = torch.zeros_like(negative) if far is None else negative & far
        if self.scope == "token":
            dropped = triggers
        elif self.scope == "response":
            dropped = negative & (step.row_sum(triggers) > 0)[step.row]
        else:
            row, place = step.row, positions(step.offsets)
            first = torch.full((len(step.offsets) - 1,), torch.iinfo(torch.int64).max, device=row.device)
            first = first.scatter_reduce(0, row[triggers], place[triggers], "amin")[row]
            dropped = negative & (place > first if self.keeps_trigger else place >= first)
        return Prepared(
            advantages=scaled_advantages(step, (~dropped).double()),
            measured={
                "veto_tokens": sampled_mean(step, dropped),
                "veto_responses": float((step.row_sum(triggers) > 0).double().mean()),
                "ratio_max_negative": float(log_ratios[negative].max().exp()) if bool(negative.any()) else 0.0,
            },
        )

    def loss(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        return clipped_loss(
            logprobs,
            batch,
            context,
            anchor_logprobs=batch.rollout_logprobs,
            bounds=(self.ratio_min, self.ratio_max),
        )
