"""The sections of a recipe that say what is learned from a batch: objective, correction, advantage.

Each is a choice by `name`; the mathematics lies in `precision.objectives`, `precision.corrections` and
`pipeline.advantages`.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from pipeline.config.section import Section


class P3OSection(Section):
    name: Literal["p3o"] = "p3o"
    ess_scope: Literal["step", "micro_batch"] = "step"
    ess_unit: Literal["token", "sequence"] = Field(
        "token",
        description="token is the paper's; sequence takes the ESS of whole responses' ratios (step scope only).",
    )
    kl_estimator: Literal["official", "importance"] = "official"

    @model_validator(mode="after")
    def _responses_are_whole(self) -> Self:
        if self.ess_unit == "sequence" and self.ess_scope != "step":
            raise ValueError("ess_unit sequence needs ess_scope step: a micro-batch may hold parts of responses")
        return self


class P4OSection(Section):
    """Experimental: with its second anchor the paper's own run at temperature 1.2 collapsed. Not for production."""

    name: Literal["p4o"] = Field(description="P3O with a second anchor; experimental.")


class ClippedSection(Section):
    name: Literal["clipped"]
    clip_low: float = Field(0.2, ge=0.0, le=1.0, description="Ratio floor is 1 - clip_low.")
    clip_high: float = Field(0.2, ge=0.0, description="Ratio ceiling is 1 + clip_high; DAPO .28.")
    dual_clip: float | None = Field(
        None, gt=1.0, description="Largest ratio that counts where the advantage is negative (dual-clip PPO: 3)."
    )
    anchor: Literal["rollout", "old"] = Field(
        "rollout",
        description="What the ratio divides by: the engine's probability, or the learner's own when its stage began "
        "(pi_old of verl and slime; the engine's mismatch is then left to `correction`).",
    )


class CISPOSection(Section):
    name: Literal["cispo"]
    cap: float = Field(5.0, ge=1.0, description="Largest importance weight of a token; 4 to 8 in ScaleRL.")


class GSPOSection(Section):
    name: Literal["gspo"]
    clip_low: float = Field(3e-4, ge=0.0, le=1.0)
    clip_high: float = Field(4e-4, ge=0.0, description="Bounds of the per-token geometric mean ratio; ScaleRL 4e-3.")
    anchor: Literal["rollout", "old"] = "rollout"


class MuGRPOSection(Section):
    name: Literal["mu_grpo"]
    ratio_min: float = Field(0.0, ge=0.0, le=1.0)
    ratio_max: float = Field(5.0, ge=1.0)
    trigger: Literal["below", "above", "none"] = Field(
        "below", description="Veto: the first token whose ratio is below (above) kappa; none turns the veto off."
    )
    kappa: PositiveFloat = 0.3
    scope: Literal["suffix", "token", "response"] = Field(
        "suffix", description="What a trigger drops where A < 0: all after it, triggers alone, the whole response."
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


class DecoupledSection(Section):
    name: Literal["decoupled"]
    clip_low: float = Field(0.2, ge=0.0, le=1.0)
    clip_high: float = Field(0.2, ge=0.0)
    mismatch_cap: float = Field(5.0, ge=1.0, description="Largest pi_old / pi_engine that counts.")
    over_cap: Literal["mask", "truncate"] = "mask"


class M2POSection(Section):
    name: Literal["m2po"]
    threshold: PositiveFloat = Field(0.04, description="Largest second moment of the harmful log-ratios.")
    variant: Literal["clip", "mask", "areal"] = Field(
        "clip", description="clip: the authors' code; mask: the paper; areal: every token, engine against pi_old."
    )


class DPPOSection(Section):
    name: Literal["dppo_tv"]
    threshold: float = Field(0.2, gt=0.0, le=1.0, description="Largest change of a token's probability.")
    square_coefficient: float = Field(1e-3, ge=0.0, description="Weight of (log ratio)².")


class TOPRSection(Section):
    name: Literal["topr"]
    clip_low: float = Field(0.0, ge=0.0)
    clip_high: PositiveFloat = Field(1.0, description="Bounds of a failed response's ratio.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.clip_low > self.clip_high:
            raise ValueError(f"clip_low {self.clip_low} is above clip_high {self.clip_high}; lower it")
        return self


ObjectiveSection = Annotated[
    P3OSection
    | ClippedSection
    | CISPOSection
    | GSPOSection
    | MuGRPOSection
    | DecoupledSection
    | M2POSection
    | DPPOSection
    | TOPRSection
    | P4OSection,
    Field(discriminator="name"),
]


class NoCorrection(Section):
    name: Literal["none"] = "none"


class TISCorrection(Section):
    name: Literal["tis"]
    cap: PositiveFloat = Field(2.0, description="Largest pi_old / pi_engine.")
    level: Literal["token", "sequence"] = "token"


class RatioRange(Section):
    """What the corrections share that let some ratios pi_old / pi_engine through."""

    low: float = Field(0.5, ge=0.0, description="Smallest ratio; geometric means need narrow ranges: .999 to 1.001.")
    high: PositiveFloat = Field(2.0, description="Largest ratio.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}; .5 and 2 are usual for tokens")
        return self


class MISCorrection(RatioRange):
    name: Literal["mis"]
    level: Literal["token", "sequence", "geometric"] = "token"
    veto: float = Field(
        0.0, ge=0.0, lt=1.0, description="A response with any ratio below this is dropped (slime: 1e-4)."
    )
    normalized: bool = Field(False, description="Weights of a batch are scaled to mean 1.")


class RejectionCorrection(RatioRange):
    name: Literal["rejection"]
    level: Literal["token", "sequence", "geometric"] = "sequence"
    veto: float = Field(0.0, ge=0.0, lt=1.0, description="As in mis.")


class IcePopCorrection(RatioRange):
    name: Literal["icepop"]
    high: PositiveFloat = 5.0


class OPSMCorrection(Section):
    name: Literal["opsm"]
    delta: PositiveFloat = Field(1e-4, description="Largest mean log-ratio of a failed response, nats a token.")


CorrectionSection = Annotated[
    NoCorrection | TISCorrection | MISCorrection | RejectionCorrection | IcePopCorrection | OPSMCorrection,
    Field(discriminator="name"),
]


class AdvantageBase(Section):
    """What all advantages share."""

    aggregation: Literal["token", "sequence", "prompt", "constant"] = Field(
        "token",
        description="What counts alike in the mean: tokens (DAPO), responses (GRPO's paper), prompts with their tokens "
        "alike (ScaleRL), or tokens over a fixed length (Dr. GRPO: rollout.max_new_tokens).",
    )
    batch_normalized: bool = Field(False, description="Divide by the standard deviation over the batch (ScaleRL).")
    zero_variance: Literal["keep", "skip", "exclude"] = Field(
        "keep",
        description="Groups of equal rewards, which have no policy gradient. keep: trained on like the others. skip: "
        "not run through the learner, but counted in every denominator and batch statistic; the gradient is that of "
        "keep. exclude: no part of the loss, its denominators and the batch statistics (ScaleRL's effective batch).",
    )


class PlainAdvantage(AdvantageBase):
    name: Literal["grpo", "dr_grpo", "rloo", "maxrl"] = Field(
        "grpo",
        description="grpo: (r - mean) / std of the group; dr_grpo: r - mean; rloo: r - mean of the others; maxrl: "
        "(r - mean) / mean.",
    )


class PassAtKAdvantage(AdvantageBase):
    name: Literal["pass_at_k"]
    k: PositiveInt = 4


class FGRPOAdvantage(AdvantageBase):
    name: Literal["f_grpo"]
    gamma: float = Field(1.0, ge=0.0, description="The group's advantages are multiplied by (1 - solve rate)^gamma.")


class AsymGRPOAdvantage(AdvantageBase):
    name: Literal["asym_grpo"]
    delta: PositiveFloat = Field(0.5, description="Negative advantages are divided by this.")


class PowerAdvantage(AdvantageBase):
    name: Literal["power"]
    alpha: float = Field(2.0, ge=1.0, description="Mass p q^alpha: larger means harder prompts.")
    delta: PositiveFloat = Field(1.0, description="Negative advantages are divided by this.")


class FADEAdvantage(AdvantageBase):
    name: Literal["fade"]
    alpha_max: float = Field(3.0, ge=1.0)
    delta_min: float = Field(0.3, gt=0.0, le=1.0)
    target_entropy: PositiveFloat | None = Field(None, description="H*, nats; default half the first step's entropy.")
    smoothing: float = Field(0.02, gt=0.0, le=1.0, description="beta")
    smoothing_keeps: Literal["old", "new"] = Field(
        "old", description="old: x ← (1 - beta) x + beta new, a window of 1/beta steps; new: the other way round."
    )


AdvantageSection = Annotated[
    PlainAdvantage | PassAtKAdvantage | FGRPOAdvantage | AsymGRPOAdvantage | PowerAdvantage | FADEAdvantage,
    Field(discriminator="name"),
]


_WEIGHS_ENGINE_BY_LEARNER = ("tis", "mis", "rejection", "icepop")
"""Corrections by pi_old / pi_engine."""
_ACTS_WITHOUT_ADVANTAGE = ("p3o", "p4o", "dppo_tv")
"""Objectives with a term that does not carry the advantage: it would be averaged otherwise than the rest."""


def needs_old_logprobs(objective: ObjectiveSection, correction: CorrectionSection) -> bool:
    """Whether the learner's own log-probabilities at the beginning of a stage are read."""
    areal = isinstance(objective, M2POSection) and objective.variant == "areal"
    anchored = getattr(objective, "anchor", "rollout") == "old"
    return areal or anchored or objective.name in ("decoupled", "p4o") or correction.name in _WEIGHS_ENGINE_BY_LEARNER


def scores_step(objective: ObjectiveSection, correction: CorrectionSection) -> bool:
    """Whether every step begins with a forward pass over the whole batch (Objective.needs_scoring)."""
    if isinstance(objective, P3OSection):
        return objective.ess_scope == "step"
    whole = objective.name in ("gspo", "mu_grpo", "m2po", "topr")
    return whole or correction.name != "none" or needs_old_logprobs(objective, correction)


def check_wiring(objective: ObjectiveSection, correction: CorrectionSection, advantage: AdvantageSection) -> None:
    """Raises ValueError for combinations that would count something twice, or average terms of a loss differently."""
    anchor = getattr(objective, "anchor", None)
    if correction.name in _WEIGHS_ENGINE_BY_LEARNER and anchor != "old":
        remedy = (
            "set objective.anchor=old, or correction.name=none"
            if anchor
            else "set correction.name=none, or use objective clipped or gspo with anchor old"
        )
        raise ValueError(
            f"correction {correction.name} weighs by pi_old / pi_engine, but objective {objective.name} already "
            f"divides by the engine's probability: the mismatch would count twice; {remedy}"
        )
    if correction.name == "opsm" and objective.name not in ("clipped", "gspo", "cispo"):
        raise ValueError(
            f"correction opsm goes with objective clipped, gspo or cispo, got {objective.name}; set "
            "correction.name=none"
        )
    if objective.name in _ACTS_WITHOUT_ADVANTAGE:
        for key, value, usual in (
            ("aggregation", advantage.aggregation, "token"),
            ("zero_variance", advantage.zero_variance, "keep"),
        ):
            if value != usual:
                raise ValueError(
                    f"advantage.{key} is {value}, but objective {objective.name} has a term without advantage that is "
                    f"a mean over all tokens; set advantage.{key}={usual}"
                )
