"""Define the recipe: one typed YAML file that describes everything about a run.

A recipe is frozen, refuses unknown keys, and is cross-checked when it is made. Importing this module loads no torch,
Megatron or SGLang. `pipeline.config.loader` reads the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pipeline.advantages.methods import GRPO, Advantage, Distillation
from pipeline.config.algorithm import AdvantageSection, CorrectionSection, ObjectiveSection, check_choices
from pipeline.config.sections import (
    MOST_PROCESSES,
    AsyncSchedule,
    Changes,
    CheckpointSection,
    EvaluationSection,
    ModelSection,
    Processes,
    RolloutSection,
    RunSection,
    ScheduleSection,
    Section,
    StagedSchedule,
    SyncSchedule,
    Temperature,
    WeightsSection,
)
from pipeline.config.sections import MegatronSection as MegatronSection
from pipeline.config.sections import OptimizerSection as OptimizerSection
from pipeline.config.task_sections import DataTask, EpisodeSection, PromptsSection, RewardSection, TaskSection
from pipeline.errors import RecipeError
from pipeline.schedule import Schedule
from precision.controller.policy import ControllerSettings
from precision.corrections import NoCorrection
from precision.objectives.p3o import P3O
from precision.reference import ReferenceSection
from precision.text import dump_yaml

LearnerPrecision = Literal["fp32", "bf16", "fp8_tensor", "fp8_block", "fp8_delayed"]


class LearnerSection(Section):
    """Parallel sizes multiply: processes = tensor × context × pipeline × data. Experts share these ranks."""

    on_resume: ClassVar[Changes] = {
        "*": "free",
        **dict.fromkeys(("temperature", "fp8_emulation", "updates_per_batch", "old_logprobs_at"), "fork"),
        **dict.fromkeys(("precision", "distributed_optimizer"), "never"),
    }

    tensor_parallel: Processes = Field(1, description="Ranks that share each matrix; best the GPUs of one host.")
    sequence_parallel: bool = Field(
        False, description="Split norms and residual stream over tensor parallel ranks; needed by MoE with tensor > 1."
    )
    pipeline_parallel: Processes = Field(1, description="Ranks that share the layers: each holds a stage.")
    virtual_pipeline: PositiveInt = Field(1, description="Model chunks of each pipeline rank (interleaved schedule).")
    context_parallel: Processes = Field(1, description="Ranks that share each sequence.")
    data_parallel: Processes = Field(1, description="Ranks that share the batch.")
    expert_parallel: Processes = Field(1, description="MoE: ranks that share the experts of a layer.")
    expert_tensor_parallel: Processes = Field(1, description="MoE: ranks that share each expert.")
    distributed_optimizer: bool = Field(True, description="Shard optimizer state over data parallel ranks.")
    overlap_grad_reduce: bool = Field(True, description="Reduce gradients while the backward pass goes on.")
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="Activations that the backward pass computes again: none, those of the MLP, or of whole layers.",
    )
    temperature: Temperature | None = Field(
        None,
        description="The policy that is trained is softmax(logits / temperature); default: that of the rollouts. "
        "Another value makes sampling itself off-policy, as in P3O's experiment (rollouts at 1.2, learner at 1).",
    )
    precision: LearnerPrecision = Field(
        "bf16",
        description="bf16: the optimizer's weights stay in float32. fp8_*: BF16 parameters, matrix products of layers "
        "in FP8 by Transformer Engine, on a GPU only. Scales: fp8_tensor one a tensor; fp8_block 128×128 for weights, "
        "1×128 for activations, as engines have them; fp8_delayed one a tensor, from earlier micro-batches.",
    )
    fp8_emulation: bool = Field(
        False,
        description="Score and train with the rollout's formats emulated, on a CPU or with Megatron's own layers: "
        "weights and activations are rounded as the engines round them, gradients pass straight through, and the "
        "optimizer's weights keep their precision. On GPUs that have FP8, learner.precision fp8_* does it in hardware.",
    )
    micro_batch_tokens: PositiveInt = Field(8192, description="Padded tokens of a micro-batch, at most.")
    updates_per_batch: PositiveInt = Field(
        1,
        description="Optimizer steps of a batch, each on other prompts (mini-batches in verl and slime). "
        "Advantages are those of the whole batch, and old log-probabilities those before its first step; denominators, "
        "an ESS or a veto of `step` scope are those of the mini-batch. Versions and lag count batches. "
        "With advantage.zero_variance=exclude a batch of few groups may make fewer steps: a learning rate that decays "
        "then ends higher.",
    )
    old_logprobs_at: Literal["update", "sampling"] = Field(
        "update",
        description="What pi_old is to objectives and corrections that divide by it. update: the learner before the "
        "first step on the batch, or on its stage, as in verl and slime. sampling: the learner at the version that "
        "sampled each token, so that pi_old / pi_engine is without staleness. It differs in async with a lag alone, "
        "where a learner's hosts then hold `lag` copies of the parameters and each stale batch is scored with them.",
    )
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    megatron: MegatronSection = Field(
        default_factory=MegatronSection,
        description="Settings that go to Megatron-Core as they are; none that another key says (docs/model.md).",
    )
    step_deadline_s: PositiveFloat = Field(600.0, description="A collective that takes longer ends the process.")

    @property
    def parameter_bytes(self) -> int:
        """Bytes of a number in parameters, activations and published weights: FP8 trains BF16 parameters."""
        return 4 if self.precision == "fp32" else 2

    @property
    def num_processes(self) -> int:
        return self.tensor_parallel * self.context_parallel * self.pipeline_parallel * self.data_parallel


MOST_COUNTED = 2**31 - 1
"""Largest count or seed: these are 32 bits in batches, in Megatron-Core and in SGLang."""
SMALLEST, LARGEST = 2.0**-126, 3e38
"""Limits of other numbers, which are used as float32."""
LONGEST_S = 2_000_000
"""Longest wait in seconds, 23 days: sockets wait no longer."""


def _numbers(value: object, key: str = "") -> Iterator[tuple[str, int | float]]:
    """Yield `section.key` and each number of a section, except in plain data for a user's own code."""
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _numbers(getattr(value, name), f"{key}.{name}".lstrip("."))
    elif isinstance(value, tuple):
        for one in value:
            yield from _numbers(one, key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value


class Recipe(Section):
    """Everything about a run. See the description of each field, or `evenkeel recipe` for the resolved file."""

    run: RunSection
    model: ModelSection
    task: TaskSection
    reward: RewardSection = Field(default_factory=RewardSection)
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    episode: EpisodeSection | None = Field(None, description="Attempts of several turns; default: one answer a prompt.")
    learner: LearnerSection = Field(default_factory=LearnerSection)
    prompts: PromptsSection = Field(default_factory=PromptsSection)
    objective: ObjectiveSection = Field(default_factory=P3O)
    correction: CorrectionSection = Field(default_factory=NoCorrection)
    advantage: AdvantageSection = Field(default_factory=GRPO, validate_default=True)
    reference: ReferenceSection | None = Field(None, description="A KL term in the loss; default: none.")
    distillation: Distillation | None = Field(None, description="A teacher that judges each token; default: none.")
    schedule: ScheduleSection = Field(default_factory=SyncSchedule)
    weights: WeightsSection = Field(default_factory=WeightsSection)
    controller: ControllerSettings | None = None
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)

    @model_validator(mode="before")
    @classmethod
    def _name_of_the_task(cls, data: Any) -> Any:
        """Return the data with a name for a user's own task, which needs none."""
        task = data.get("task") if isinstance(data, dict) else None
        if isinstance(task, dict) and "class" in task and "name" not in task:
            return {**data, "task": {**task, "name": "own"}}
        return data

    @field_validator("advantage")
    @classmethod
    def _aggregated_as_in_the_paper(cls, advantage: Advantage, info: ValidationInfo) -> Advantage:
        """Return the advantage with the aggregation of the objective's paper, where the recipe sets none."""
        paper = getattr(info.data.get("objective"), "paper_aggregation", None)  # absent where it was refused
        if paper is None or "aggregation" in advantage.model_fields_set:
            return advantage
        return advantage.model_copy(update={"aggregation": paper})

    @model_validator(mode="after")
    def _numbers_fit(self) -> Self:
        for key, number in _numbers(self):
            low, high = (-MOST_COUNTED, MOST_COUNTED) if isinstance(number, int) else (-LARGEST, LARGEST)
            if key.endswith("_s"):
                high = LONGEST_S
            if not low <= number <= high:
                raise ValueError(f"{key} is {number}, expected at most {high if number > 0 else low:.10g}")
            if isinstance(number, float) and 0 < abs(number) < SMALLEST:
                raise ValueError(f"{key} is {number}, expected 0 or at least {SMALLEST:g}: float32 has nothing between")
        return self

    @model_validator(mode="after")
    def _choices_go_together(self) -> Self:
        rollout, learner, least = self.rollout, self.learner, self.advantage.smallest_group
        alone = self.distillation is not None and self.distillation.judges_alone
        if rollout.group_size < least and not alone:
            raise ValueError(
                f"rollout.group_size is {rollout.group_size}, but advantage {self.advantage.name} compares samples of "
                f"one prompt; use at least {least}"
            )
        check_choices(self)
        prompts, updates = rollout.prompts_per_batch, learner.updates_per_batch
        if prompts % updates:
            raise ValueError(
                f"rollout.prompts_per_batch {prompts} is no multiple of learner.updates_per_batch {updates}: the "
                "optimizer steps of a batch would differ in size; change one of them"
            )
        if prompts // updates * rollout.group_size < learner.data_parallel:
            raise ValueError(
                f"an optimizer step on {prompts // updates} prompts × {rollout.group_size} samples cannot fill "
                f"learner.data_parallel {learner.data_parallel}; raise rollout.prompts_per_batch"
            )
        if learner.micro_batch_tokens < rollout.context_tokens:
            raise ValueError(
                f"learner.micro_batch_tokens {learner.micro_batch_tokens} is below rollout.context_tokens "
                f"{rollout.context_tokens}: the longest sample would not fit; raise the first or lower the second"
            )
        if self.weights.channel == "delta" and (rollout.urls or self.controller is not None):
            named = "rollout.urls names engines that have none"
            why = named if rollout.urls else "controller may change its formats"
            raise ValueError(f"weights.channel is delta, which needs a replica beside each engine, but {why}; use disk")
        if rollout.colocated:
            others = {
                f"weights.channel is {self.weights.channel}; use ipc": self.weights.channel != "ipc",
                f"schedule.kind is {self.schedule.kind}; use sync": self.schedule.kind != "sync",
                "rollout.urls names engines that others share; leave it out": bool(rollout.urls),
                "controller may have engines started again meanwhile; leave it out": self.controller is not None,
                "learner.megatron.transformer.cuda_graph_impl keeps addresses of gradients, which move; leave it out": (
                    learner.megatron.transformer.get("cuda_graph_impl", "none") != "none"
                ),
            }
            for why in (why for why, is_so in others.items() if is_so):
                raise ValueError(f"rollout.colocated is true: engines sleep while the learner trains, but {why}")
        if self.episode is not None:
            others = {
                "distillation: its teacher scores single answers": self.distillation is not None,
                "rollout.interruption: it cuts single answers": rollout.interruption is not None,
                "reward.overlong: it is about single answers": self.reward.overlong is not None,
            }
            for why in (why for why, is_so in others.items() if is_so):
                raise ValueError(f"episode does not go together with {why}; leave one of them out")
        if isinstance(self.schedule, StagedSchedule) and self.schedule.updates_per_stage > self.run.steps:
            raise ValueError(
                f"schedule.updates_per_stage {self.schedule.updates_per_stage} exceeds run.steps {self.run.steps}; "
                "lower it, or train longer"
            )
        return self

    @property
    def reads_sampling_logprobs(self) -> bool:
        """Whether the run needs each token's log-probability under the learner of the version that sampled it."""
        asked = self.learner.old_logprobs_at == "sampling" or self.learner.optimizer.lr_by_lag == "ess"
        return asked or self.objective.facts.needs_sampling_logprobs

    @property
    def started_teacher(self) -> Distillation | None:
        """The teacher whose server the run starts, or None."""
        return self.distillation if self.distillation is not None and self.distillation.path is not None else None

    @property
    def num_kept_versions(self) -> int:
        """Older versions of the weights that the learner keeps in host memory."""
        return self.schedule.lag if self.reads_sampling_logprobs and isinstance(self.schedule, AsyncSchedule) else 0

    @property
    def most_sampled_tokens(self) -> int:
        """The most tokens that the policy samples in an attempt: an answer, or an episode."""
        longest, episode = self.rollout.max_new_tokens, self.episode
        return longest if episode is None else episode.sampled_tokens or episode.turns * longest

    @property
    def directory(self) -> Path:
        return self.run.root / self.run.name

    def build_schedule(self) -> Schedule:
        """Return the schedule, which both loops ask for required versions."""
        return Schedule(steps=self.run.steps, **self.schedule.model_dump())

    def to_yaml(self) -> str:
        """Return the resolved recipe, with every default spelled out."""
        return dump_yaml(self.model_dump(mode="json"))


_LAYOUT_SIZES = {
    "TP": "tensor_parallel",
    "PP": "pipeline_parallel",
    "VPP": "virtual_pipeline",
    "CP": "context_parallel",
    "EP": "expert_parallel",
    "ETP": "expert_tensor_parallel",
    "DP": "data_parallel",
    "MB": "micro_batch_rows",
}
_LAYOUT_WORDS: dict[str, dict[str, Any]] = {
    "one": {},
    "SP": {"sequence_parallel": True},
    "RECOMPUTE": {"recompute": "full"},
    "SELECTIVE": {"recompute": "selective"},
    "PLAIN": {"distributed_optimizer": False, "overlap_grad_reduce": False},
}


def parse_layout(name: str) -> dict[str, Any]:
    """Return the LearnerSection fields of a layout such as TP2×PP2 or TP2xPP2, and `micro_batch_rows` for MBn.

    When experts are spread over more ranks than are named, data parallel ranks are added. Raises RecipeError.
    """
    fields: dict[str, Any] = {}
    for part in re.split(r"[×x+]", name):
        match = re.fullmatch(r"([A-Z]+)([1-9]\d*)", part)
        if part in _LAYOUT_WORDS:
            fields |= _LAYOUT_WORDS[part]
        elif match is not None and match[1] in _LAYOUT_SIZES:
            fields[_LAYOUT_SIZES[match[1]]] = int(match[2])
        else:
            raise RecipeError(
                f"layout {name!r}: {part!r} is not one of {', '.join(f'{key}n' for key in _LAYOUT_SIZES)} or "
                f"{', '.join(_LAYOUT_WORDS)}; for example TP2×PP2"
            )
    spread = fields.get("expert_parallel", 1) * fields.get("expert_tensor_parallel", 1)
    named = fields.get("tensor_parallel", 1) * fields.get("context_parallel", 1)
    if "data_parallel" not in fields and spread > named:
        fields["data_parallel"] = spread // named
    if (
        most := max((size for key, size in fields.items() if key in _LAYOUT_SIZES.values()), default=1)
    ) > MOST_PROCESSES:
        raise RecipeError(f"layout {name!r} has {most} ranks, expected at most {MOST_PROCESSES}")
    return fields


def layout_name(learner: LearnerSection) -> str:
    """Return the name of a learner's layout, such as `TP4×PP4×DP2×SP` or `one`; `parse_layout` reads it."""
    sizes = ((name, getattr(learner, field, 1)) for name, field in _LAYOUT_SIZES.items())
    parts = [f"{name}{size}" for name, size in sizes if size > 1]
    if learner.sequence_parallel and learner.tensor_parallel > 1:
        parts.append("SP")
    parts += [word for word, fields in _LAYOUT_WORDS.items() if fields.get("recompute") == learner.recompute]
    return "×".join(parts) or "one"


def advice(recipe: Recipe) -> list[str]:
    """Return a sentence for each key that cannot have an effect; the recipe runs all the same.

    A clip of pi / pi_old acts only where pi_old is older than the step: after the first of several updates on a batch,
    in a stage of several batches, or where it is the policy that sampled.
    """
    found = []
    schedule = recipe.schedule
    staged = isinstance(schedule, StagedSchedule) and schedule.updates_per_stage > 1
    stale = isinstance(schedule, AsyncSchedule) and recipe.reads_sampling_logprobs
    if recipe.objective.facts.clips_by_old_ratio and not (staged or stale or recipe.learner.updates_per_batch > 1):
        found.append(
            f"the clip of objective {recipe.objective.name} never acts: its ratio is pi / pi_old, and with one update "
            "a batch the policy is its own pi_old; set learner.updates_per_batch above 1 (4 is usual), with async "
            "learner.old_logprobs_at=sampling, or objective clipped with anchor=rollout"
        )
    sources = recipe.task.sources if isinstance(recipe.task, DataTask) else ()
    if len(sources) > recipe.evaluation.prompts:
        found.append(
            f"evaluation.prompts is {recipe.evaluation.prompts}, and task.sources are {len(sources)}: some are never "
            f"measured; set it to {len(sources)} or more"
        )
    return found
