"""Register the objectives, corrections and advantages that a recipe can choose, and refuse wrong combinations.

The classes and their settings stand in `precision.objectives`, `precision.corrections` and
`pipeline.advantages.methods`. A recipe chooses them by name. Facts that each class states decide what goes together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pipeline.advantages.methods import Advantage
from pipeline.config.choice import Choice
from pipeline.errors import RecipeError
from precision.corrections import Correction
from precision.formats.rollout_format import RolloutFormat
from precision.objectives.objective import Objective
from precision.settings import choices_in

if TYPE_CHECKING:
    from pipeline.config.recipe import Recipe

OBJECTIVES: dict[str, type[Objective]] = choices_in("precision.objectives", Objective)
CORRECTIONS: dict[str, type[Correction]] = choices_in("precision.corrections", Correction)
ADVANTAGES: dict[str, type[Advantage]] = choices_in("pipeline.advantages.methods", Advantage)

_NO_OBJECTIVES = {
    **{name: f"{name} is an advantage (advantage.name); its objective is clipped" for name in ADVANTAGES},
    **dict.fromkeys(("ppo", "reinforce", "dapo"), "PPO's objective is clipped; there is no critic"),
}
_NO_ADVANTAGES = {name: f"{name} is an objective (objective.name)" for name in OBJECTIVES if name not in ADVANTAGES}
"""Names that a user may look for in the wrong place → explanation, shown instead of a similar name."""

ObjectiveSection = Annotated[Objective, Choice(Objective, OBJECTIVES, _NO_OBJECTIVES)]
CorrectionSection = Annotated[Correction, Choice(Correction, CORRECTIONS)]
AdvantageSection = Annotated[Advantage, Choice(Advantage, ADVANTAGES, _NO_ADVANTAGES)]


def check_choices(recipe: Recipe) -> None:
    """Raise ValueError for a combination that counts something twice, averages the terms of a loss differently, weighs
    by probabilities that were not sampled with, or leaves out what another choice needs."""
    objective, correction, advantage = recipe.objective, recipe.correction, recipe.advantage
    rollout, learner, overlong = recipe.rollout, recipe.learner, recipe.reward.overlong
    zero_variance = advantage.zero_variance
    anchored = _either([name for name, choice in OBJECTIVES.items() if "anchor" in choice.model_fields])
    if correction.weighs_by_old_ratio and objective.facts.weighs_by_rollout_ratio:
        remedy = f"set correction.name=none, or use objective {anchored} with anchor old"
        if "anchor" in type(objective).model_fields:
            remedy = "set objective.anchor=old, or correction.name=none"
        raise ValueError(
            f"correction {correction.name} weighs by pi_old / pi_engine, but objective {objective.name} already "
            f"divides by the engine's probability: the mismatch would count twice; {remedy}"
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
            ("zero_variance", zero_variance, "keep"),
        ):
            if value != usual:
                raise ValueError(
                    f"advantage.{key} is {value}, but objective {objective.name} has a term without advantage that is "
                    f"a mean over all tokens; set advantage.{key}={usual}"
                )
    if advantage.moving_parts and zero_variance == "skip":
        raise ValueError(
            f"advantage.zero_variance is skip, but advantage {advantage.name} follows the entropy of all groups, and "
            "it would be that of the groups with an advantage alone; set advantage.zero_variance to keep, or to exclude"
        )

    # Without kept sets an engine stores log-probabilities over the whole vocabulary. With top_p or top_k it samples
    # from the most likely tokens only, each with more than its stored probability. So the mean of pi / pi_engine over
    # samples is not 1, as an importance weight's must be: it was .755 in a check at top_p .8.
    is_cut = rollout.top_p < 1.0 or rollout.top_k != -1
    unknown_cut = is_cut and not rollout.asks_for_kept_sets
    if recipe.reference is not None and unknown_cut and recipe.reference.estimator == "importance":
        raise ValueError(
            "reference.estimator is importance, which weighs by the engine's stored probabilities, but rollout.top_p "
            "or top_k cuts the vocabulary: set rollout.kept_set=true (SGLang 0.5.23), or use k2 or k3"
        )
    if recipe.reference is not None and zero_variance == "skip":
        raise ValueError(
            "advantage.zero_variance is skip, but the KL to the reference is over the tokens of all groups, those "
            "without advantage too; set advantage.zero_variance to keep, or to exclude"
        )
    if recipe.distillation is not None:
        if zero_variance != "keep":
            raise ValueError(
                f"advantage.zero_variance is {zero_variance}, but with distillation groups of equal rewards have "
                "an advantage, too; set it to keep"
            )
        if recipe.prompts.refill:
            raise ValueError(
                "prompts.refill drops groups of equal rewards, but with distillation these have an advantage, too; set "
                "prompts.refill to false"
            )
        if learner.temperature is not None and learner.temperature != rollout.temperature:
            raise ValueError(
                f"learner.temperature is {learner.temperature:g} and rollout.temperature {rollout.temperature:g}, but "
                "distillation makes the student as it is sampled equal to the teacher; leave learner.temperature out"
            )
        if is_cut:
            raise ValueError(
                f"rollout.top_p is {rollout.top_p:g} and top_k {rollout.top_k}, but distillation compares "
                "distributions over the whole vocabulary; leave both out"
            )
    if advantage.asks_what_is_solved and recipe.reward.solved_at < 1e-30:  # what is far less is 0 as float32
        raise ValueError(
            f"reward.solved_at is {recipe.reward.solved_at:g}, but advantage.name is {advantage.name}, which takes a "
            "reward's share of it, from 0 to 1, for how far a sample is solved; let the reward give more than 0 where "
            "a problem is solved, or use advantage.name=grpo"
        )
    if overlong is not None and advantage.asks_what_is_solved:
        raise ValueError(
            f"advantage.name is {advantage.name}, which asks how far a sample is solved, from 0 to 1: with "
            "reward.overlong a long right answer would count as unsolved, and a long wrong one lose nothing; set "
            "reward.overlong=null, and advantage.truncated=exclude in its place"
        )
    if overlong is not None and overlong.buffer_tokens > (longest := rollout.max_new_tokens):
        raise ValueError(
            f"reward.overlong.buffer_tokens {overlong.buffer_tokens} exceeds rollout.max_new_tokens {longest}: every "
            f"response would be punished; lower it, DAPO has a fifth ({max(1, longest // 5)})"
        )
    if learner.fp8_emulation and rollout.quantized_format is None:
        raise ValueError(
            "learner.fp8_emulation emulates the quantization of the rollouts, but rollout.precision is "
            f"{rollout.precision}; set rollout.precision to fp8_block or another quantized format, or "
            "learner.fp8_emulation=false"
        )
    if learner.fp8_emulation and learner.precision.startswith("fp8"):
        raise ValueError(
            f"learner.fp8_emulation is true, but learner.precision is {learner.precision}, which multiplies in FP8 "
            "already; set learner.precision to bf16 or fp32 (emulated, any machine), or learner.fp8_emulation=false "
            "(on a GPU)"
        )
    by_objective = objective.facts.weighs_by_rollout_ratio
    if unknown_cut and (by_objective or correction.reads_rollout_logprobs):
        cut, whole = f"top_k is {rollout.top_k}", "top_k=-1"
        if rollout.top_p < 1.0:
            cut, whole = f"top_p is {rollout.top_p}", "top_p=1"
        who = f"objective {objective.name}" if by_objective else f"correction {correction.name}"
        raise ValueError(
            f"rollout.{cut}, but {who} weighs by the engine's stored probabilities, which are those over "
            "the whole vocabulary and not those that the cut samples with: every weight would be biased (a mean ratio "
            "of .755 instead of 1 was found at top_p .8); set rollout.kept_set=true (SGLang 0.5.23), or "
            f"rollout.{whole}, or use objective {anchored} with anchor old and no correction"
        )


def _either(names: list[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def check_gpu_serves(rollout_format: RolloutFormat | None) -> None:
    """Raise RecipeError for a format that engines on GPUs lack or cannot update; None is not quantized."""
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
    """Raise RecipeError for a format that does not support mixtures of experts."""
    if experts and rollout_format is not None and rollout_format.is_emulated:
        raise RecipeError(
            f"rollout.precision is {rollout_format}, which is emulated in dense models only, but the model has "
            "experts; set bf16 or fp32, or take a dense model"
        )
