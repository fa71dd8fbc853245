"""Choose what is learned from a batch, objective, correction and advantage, and refuse what does not go together.

The classes and their settings stand in `precision.objectives`, `precision.corrections` and
`pipeline.advantages.methods`. A recipe can choose every class that is defined there, by its name. What goes together is
decided by what each class states about itself.
"""

from __future__ import annotations

from typing import Annotated

from pipeline.advantages.methods import Advantage, Distillation, OverlongPenalty
from pipeline.config.choice import Choice
from pipeline.errors import RecipeError
from precision.corrections import Correction
from precision.formats.rollout_format import RolloutFormat
from precision.objectives.base import Objective
from precision.reference import ReferenceSection
from precision.settings import choices_in

OBJECTIVES: dict[str, type[Objective]] = choices_in("precision.objectives", Objective)
CORRECTIONS: dict[str, type[Correction]] = choices_in("precision.corrections", Correction)
ADVANTAGES: dict[str, type[Advantage]] = choices_in("pipeline.advantages.methods", Advantage)
"""Name → class."""

_NO_OBJECTIVES = {
    **{name: f"{name} is an advantage (advantage.name); its objective is clipped" for name in ADVANTAGES},
    **dict.fromkeys(("ppo", "reinforce", "dapo"), "PPO's objective is clipped; there is no critic"),
}
_NO_ADVANTAGES = {name: f"{name} is an objective (objective.name)" for name in OBJECTIVES if name not in ADVANTAGES}
"""Names that somebody may look for in the wrong place → what to say, in place of a name spelled nearly so."""

ObjectiveSection = Annotated[Objective, Choice(Objective, OBJECTIVES, _NO_OBJECTIVES)]
CorrectionSection = Annotated[Correction, Choice(Correction, CORRECTIONS)]
AdvantageSection = Annotated[Advantage, Choice(Advantage, ADVANTAGES, _NO_ADVANTAGES)]


def with_paper_aggregation(advantage: Advantage, objective: Objective) -> Advantage:
    """Return the advantage with the aggregation of the objective's paper, where a recipe sets none."""
    if objective.paper_aggregation is None or "aggregation" in advantage.model_fields_set:
        return advantage
    return advantage.model_copy(update={"aggregation": objective.paper_aggregation})


def usual_aggregation(advantage: type[Advantage], objective: type[Objective]) -> str:
    """Return the aggregation of a recipe that sets none."""
    return objective.paper_aggregation or str(advantage.model_fields["aggregation"].default)


def check_wiring(objective: Objective, correction: Correction, advantage: Advantage) -> None:
    """Raise ValueError for combinations that would count something twice, or average terms of a loss differently."""
    if correction.weighs_by_old_ratio and objective.facts.weighs_by_rollout_ratio:
        raise ValueError(
            f"correction {correction.name} weighs by pi_old / pi_engine, but objective {objective.name} already "
            f"divides by the engine's probability: the mismatch would count twice; {_remedy(objective)}"
        )
    if correction.drops_what_the_learner_left and not objective.may_drop_responses:
        fitting = [name for name, choice in OBJECTIVES.items() if choice.may_drop_responses]
        raise ValueError(
            f"correction {correction.name} goes with objective {_either(fitting)}, got {objective.name}, which has "
            "its own rule for responses that the learner has left; set correction.name=none"
        )
    if objective.facts.has_term_without_advantage:
        for key, value, usual in (
            ("aggregation", advantage.aggregation, "token"),
            ("zero_variance", advantage.zero_variance, "keep"),
        ):
            if value != usual:
                raise ValueError(
                    f"advantage.{key} is {value}, but objective {objective.name} has a term without advantage that is "
                    f"a mean over all tokens; set advantage.{key}={usual}"
                )
    if advantage.moving_parts and advantage.zero_variance == "skip":
        raise ValueError(
            f"advantage.zero_variance is skip, but advantage {advantage.name} follows the entropy of all groups, and "
            "it would be that of the groups with an advantage alone; set advantage.zero_variance to keep, or to exclude"
        )


def check_solved_at(solved_at: float, advantage: Advantage) -> None:
    """Raise ValueError where a formula would measure how far a sample is solved by a number that is not above 0."""
    if advantage.asks_what_is_solved and solved_at < 1e-30:  # what is far less is 0 as float32
        raise ValueError(
            f"reward.solved_at is {solved_at:g}, but advantage.name is {advantage.name}, which takes a reward's share "
            "of it, from 0 to 1, for how far a sample is solved; let the reward give more than 0 where a problem is "
            "solved, or use advantage.name=grpo"
        )


def check_overlong(overlong: OverlongPenalty | None, advantage: Advantage, longest: int) -> None:
    """Raise ValueError where a penalty for length begins before the first of `longest` tokens, or would be taken for an
    answer that is not solved."""
    if overlong is None:
        return
    if advantage.asks_what_is_solved:
        raise ValueError(
            f"advantage.name is {advantage.name}, which asks how far a sample is solved, from 0 to 1: with "
            "reward.overlong a long right answer would count as unsolved, and a long wrong one lose nothing; set "
            "reward.overlong=null, and advantage.truncated=exclude in its place"
        )
    if overlong.buffer_tokens > longest:
        raise ValueError(
            f"reward.overlong.buffer_tokens {overlong.buffer_tokens} exceeds rollout.max_new_tokens {longest}: every "
            f"response would be punished; lower it, DAPO has a fifth ({max(1, longest // 5)})"
        )


def check_reference(reference: ReferenceSection | None, advantage: Advantage, *, cut: bool) -> None:
    """Raise ValueError where groups that the KL term is over would not be run through the model, or where it weighs by
    stored probabilities of a vocabulary that was `cut` without a record of what was left (`check_sampler`)."""
    if reference is not None and cut and reference.estimator == "importance":
        raise ValueError(
            "reference.estimator is importance, which weighs by the engine's stored probabilities, but rollout.top_p "
            "or top_k cuts the vocabulary: set rollout.kept_set=true (SGLang 0.5.23), or use k2 or k3"
        )
    if reference is not None and advantage.zero_variance == "skip":
        raise ValueError(
            "advantage.zero_variance is skip, but the KL to the reference is over the tokens of all groups, those "
            "without advantage too; set advantage.zero_variance to keep, or to exclude"
        )


def check_distillation(distillation: Distillation | None, advantage: Advantage, *, refill: bool) -> None:
    """Raise ValueError where groups would be left out by their rewards, though a teacher judges their tokens."""
    if distillation is None:
        return
    if advantage.zero_variance != "keep":
        raise ValueError(
            f"advantage.zero_variance is {advantage.zero_variance}, but with distillation groups of equal rewards have "
            "an advantage, too; set it to keep"
        )
    if refill:
        raise ValueError(
            "prompts.refill drops groups of equal rewards, but with distillation these have an advantage, too; set "
            "prompts.refill to false"
        )


def check_whole_distributions(sampled: float, learned: float | None, top_p: float, top_k: int) -> None:
    """Raise ValueError where a teacher would be compared with another distribution than the one that is trained: at
    temperature `sampled` by the engine and `learned` by the learner, or cut by the engine."""
    if learned is not None and learned != sampled:
        raise ValueError(
            f"learner.temperature is {learned:g} and rollout.temperature {sampled:g}, but distillation makes the "
            "student as it is sampled equal to the teacher; leave learner.temperature out"
        )
    if top_p < 1.0 or top_k != -1:
        raise ValueError(
            f"rollout.top_p is {top_p:g} and top_k {top_k}, but distillation compares distributions over the whole "
            "vocabulary; leave both out"
        )


def check_sampler(objective: Objective, correction: Correction, *, top_p: float, top_k: int) -> None:
    """Raise ValueError where the engine samples from a part of the vocabulary, does not say which part, and a weight
    divides by what it stored.

    Without kept sets an engine stores log-probabilities over the whole vocabulary. With top_p or top_k it samples from
    the most likely tokens only, each with more than its stored probability. So the mean of pi / pi_engine over samples
    is not 1, as an importance weight's must be: it was .755 in a check at top_p .8.
    """
    by_objective = objective.facts.weighs_by_rollout_ratio
    if (top_p >= 1.0 and top_k == -1) or not (by_objective or correction.reads_rollout_logprobs):
        return
    key, value, whole = ("top_p", top_p, "1") if top_p < 1.0 else ("top_k", top_k, "-1")
    who = f"objective {objective.name}" if by_objective else f"correction {correction.name}"
    raise ValueError(
        f"rollout.{key} is {value}, but {who} weighs by the engine's stored probabilities, which are those over the "
        "whole vocabulary and not those that the cut samples with: every weight would be biased (a mean ratio of .755 "
        "instead of 1 was found at top_p .8); set rollout.kept_set=true (SGLang 0.5.23), or "
        f"rollout.{key}={whole}, or use objective {_with_anchor()} with anchor old and no correction"
    )


def _remedy(objective: Objective) -> str:
    if "anchor" in type(objective).model_fields:
        return "set objective.anchor=old, or correction.name=none"
    return f"set correction.name=none, or use objective {_with_anchor()} with anchor old"


def _with_anchor() -> str:
    return _either([name for name, choice in OBJECTIVES.items() if "anchor" in choice.model_fields])


def _either(names: list[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def check_emulation(fp8_emulation: bool, learner: str, rollout: str, quantized: RolloutFormat | None) -> None:
    """Raise ValueError where `learner.fp8_emulation` has no format to emulate, or learner.precision is FP8 already.

    `learner` and `rollout`: the two precisions. `quantized`: the rollout's format, if it is quantized.
    """
    if not fp8_emulation:
        return
    if quantized is None:
        raise ValueError(
            f"learner.fp8_emulation emulates the quantization of the rollouts, but rollout.precision is {rollout}; set "
            "rollout.precision to fp8_block or another quantized format, or learner.fp8_emulation=false"
        )
    if learner.startswith("fp8"):
        raise ValueError(
            f"learner.fp8_emulation is true, but learner.precision is {learner}, which multiplies in FP8 already; set "
            "learner.precision to bf16 or fp32 (emulated, any machine), or learner.fp8_emulation=false (on a GPU)"
        )


def check_gpu_serves(rollout_format: RolloutFormat | None) -> None:
    """Raise RecipeError for a format that engines on GPUs do not have, or cannot be given new weights in; None is not
    quantized."""
    if rollout_format is RolloutFormat.FP8_TENSOR:
        # Fp8LinearMethod puts bare parameters, transposed and without weight_loader, in place of those that it loaded.
        raise RecipeError(
            "rollout.precision is fp8_tensor, which SGLang makes itself as it loads: on a GPU it cannot load the next "
            "version over that, and the engine dies; set fp8_block, which the learner makes, or bf16"
        )
    if rollout_format is not None and rollout_format.is_emulated:
        raise RecipeError(
            f"rollout.precision is {rollout_format}, which engines on CPUs emulate and no GPU of ours serves; set "
            "fp8_block or bf16, or run on a machine without a GPU"
        )


def check_mixture(rollout_format: RolloutFormat | None, *, experts: bool) -> None:
    """Raise RecipeError for a format that has no mixture of experts."""
    if experts and rollout_format is not None and rollout_format.is_emulated:
        raise RecipeError(
            f"rollout.precision is {rollout_format}, which is emulated in dense models only, but the model has "
            "experts; set bf16 or fp32, or take a dense model"
        )
