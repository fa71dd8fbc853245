"""What the corrections share: the ratio k of a token or its response, bounds, the veto, and shares by sign of A."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from precision.corrections.base import Correction
from precision.objectives.base import ScoredStep
from precision.objectives.tokens import sampled_mean
from precision.torch_on_use import Tensor, torch

Level = Annotated[
    Literal["token", "sequence", "geometric"],
    Field(
        description="Whose ratio is held to the range: the token's own; the product over its response; or the "
        "geometric mean over its response, which does not depend on length and wants bounds close to 1."
    ),
]

Veto = Annotated[
    float,
    Field(
        ge=0.0,
        lt=1.0,
        description="A response with the ratio of any token below this is dropped whole; 1e-4 in slime, 0 is off.",
    ),
]

LOG_RATIO_LIMIT = 20.0
"""Nats. log k is clamped to this before exp, as in verl and slime: no product over a long response overflows."""


class RatioRange(Correction):
    """What the corrections share that let some ratios pi_old / pi_engine through."""

    low: float = Field(
        0.5,
        ge=0.0,
        description="Smallest ratio; .5 and 2 are usual. Level geometric needs a narrow range: .999 to 1.001 in verl, "
        ".9999 to 1.0001 in slime.",
    )
    high: PositiveFloat = Field(2.0, description="Largest ratio.")

    reads_step_logprobs: ClassVar[bool] = False

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}; .5 and 2 are usual for tokens")
        return self


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


def kept_tokens(step: ScoredStep, ratios: Tensor, low: float, high: float, veto: float) -> Tensor:
    """bool [tokens]: those whose ratio k is in [low, high] and whose response is not vetoed."""
    return (low <= ratios) & (ratios <= high) & ~vetoed(step, veto)


def measured(step: ScoredStep, factor: Tensor, name: str, hit: Tensor) -> dict[str, float]:
    """`correction_factor` (its mean over sampled tokens), and `correction_NAME_positive` and `_negative`: tokens in
    `hit` (bool [tokens]) with A > 0 and with A < 0, as shares of all sampled tokens."""
    return {
        "correction_factor": sampled_mean(step, factor),
        f"correction_{name}_positive": sampled_mean(step, hit & (step.advantages > 0)),
        f"correction_{name}_negative": sampled_mean(step, hit & (step.advantages < 0)),
    }
